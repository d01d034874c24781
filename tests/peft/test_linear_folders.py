"""Folders of LoRA's kin and IA3: the real peft loads ours and gives the same logits, we load peft's, strangers' are
judged before they are believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import peft
import pytest
import torch
import yaml
from peft.utils import PeftType
from safetensors.torch import load_file, save_file
from torch import Tensor

from muxtune.data.manifest import JsonValue
from muxtune.errors import AdapterError
from muxtune.models.attach import Pass
from muxtune.models.attention import AttentionContext, Segment
from muxtune.models.backbone import Backbone
from muxtune.peft import ia3_type
from muxtune.peft.base import Adapter, Dispatch
from muxtune.peft.check_vllm import check_vllm
from muxtune.peft.convert import PREFIX
from muxtune.peft.folder import write_adapter
from muxtune.peft.multiplex import hooks
from muxtune.peft.registry import build_adapter, give, payload, read_stored, start_from
from muxtune.spec.peft import IA3, Lora, PeftBase
from tests.engine.build import CPU, backbone_of
from tests.engine.linears import NAMES, start_state, trial_called
from tests.exact import exact_fp64
from tests.peft.adapters import MANIFEST, linear_sizes
from tests.reference_linears import named_parameters, peft_config
from tests.tiny import tiny_model

ARCHS = ("llama", "gpt2", "opt", "qwen2")
IDS_T = torch.randint(3, 320, (16,), generator=torch.Generator().manual_seed(3))


def adapter_of(backbone: Backbone, spec: PeftBase, state: dict[str, Tensor]) -> Adapter:
    with exact_fp64():
        adapter = build_adapter(spec, backbone, seed=0, dtype=backbone.dtype, device=CPU)
        give(adapter, state, where="test")
    return adapter


def our_logits(backbone: Backbone, adapter: Adapter) -> Tensor:
    with torch.no_grad(), exact_fp64():
        hooked = hooks([Dispatch(0, 16, adapter, None)], joined=backbone.groups)
        hidden_TD = backbone.hidden(IDS_T, torch.arange(16), Pass(AttentionContext([Segment(16)]), hooked))
        return backbone.head.logits(hidden_TD)


def logits_of(model: peft.PeftModel) -> Tensor:
    with torch.no_grad(), exact_fp64():
        found: Tensor = model.eval()(IDS_T[None], use_cache=False).logits[0]
    return found


@cache
def trained(arch: str, name: str) -> tuple[Adapter, Tensor]:
    """An adapter some way from its start, on fp64, and its logits."""
    backbone = backbone_of(arch, torch.float64)
    trial = trial_called(name)
    adapter = adapter_of(backbone, trial.peft, start_state(backbone_of(arch), trial))
    return adapter, our_logits(backbone, adapter)


def write(arch: str, name: str, dest: Path) -> Path:
    adapter, _ = trained(arch, name)
    write_adapter(dest, payload(trial_called(name).peft, adapter, backbone_of(arch)), MANIFEST)
    return dest


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ARCHS)
def test_peft_loads_what_we_write_and_gives_the_same_logits(arch: str, name: str, tmp_path: Path) -> None:
    folder = write(arch, name, tmp_path / "a")
    base = tiny_model(arch, dtype=torch.float64)
    with torch.no_grad(), exact_fp64():
        bare = base(IDS_T[None]).logits[0]
    model = peft.PeftModel.from_pretrained(base, folder)
    assert model.peft_config["default"].peft_type is (PeftType.IA3 if name == "ia3" else PeftType.LORA)
    # Every tensor of the file has a place in peft, every place of peft's a tensor.
    answer = model.load_adapter(folder, adapter_name="again")
    assert not answer.unexpected_keys and not [key for key in answer.missing_keys if ".again" in key]
    adapter, expected = trained(arch, name)
    adapted = {name for name, module in base.named_modules() if hasattr(module, "lora_A") or hasattr(module, "ia3_l")}
    assert adapted == set(adapter.modules)
    model.set_adapter("default")
    torch.testing.assert_close(logits_of(model.double()), expected, rtol=1e-9, atol=1e-9)
    assert float((expected - bare).abs().max()) > 0.05, "the adapter must matter, or nothing is shown"


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("pissa")])
@pytest.mark.parametrize("arch", ARCHS)
def test_we_read_what_peft_writes(arch: str, name: str, tmp_path: Path) -> None:
    """But for a PiSSA of peft's own, which is refused below."""
    trial = trial_called(name)
    state = start_state(backbone_of(arch), trial)
    config = peft_config(trial.peft, tiny_model(arch), state)
    model = peft.get_peft_model(tiny_model(arch), config)
    with torch.no_grad():
        for point, parameter in named_parameters(model).items():
            parameter.copy_(state[point].view_as(parameter))
    model.save_pretrained(tmp_path)

    stored = read_stored(tmp_path, backbone_of(arch), base_sha256="ff" * 32)
    assert stored.manifest is None and type(stored.spec) is type(trial.peft)
    assert stored.values.keys() == state.keys()
    assert all(torch.equal(stored.values[point], value) for point, value in state.items())
    backbone = backbone_of(arch, torch.float64)
    ours = our_logits(backbone, adapter_of(backbone, stored.spec, dict(stored.values)))
    torch.testing.assert_close(ours, logits_of(model.double()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ARCHS)
def test_we_read_what_we_write(arch: str, name: str, tmp_path: Path) -> None:
    stored = read_stored(write(arch, name, tmp_path / "a"), backbone_of(arch), base_sha256="ab" * 32)
    adapter, expected = trained(arch, name)
    backbone = backbone_of(arch, torch.float64)
    again = adapter_of(backbone, stored.spec, dict(stored.values))
    torch.testing.assert_close(our_logits(backbone, again), expected, rtol=1e-12, atol=1e-12)
    spec = trial_called(name).peft
    if isinstance(spec, Lora) and spec.pissa:
        assert isinstance(stored.spec, Lora)
        assert stored.spec.r == 2 * spec.r and stored.spec.scaling == pytest.approx(spec.scaling, rel=1e-15)
    else:
        assert all(torch.equal(value.double(), adapter.state()[point]) for point, value in stored.values.items())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_a_job_goes_on_from_its_own_folder(arch: str, name: str, tmp_path: Path) -> None:
    """Under its own peft, or as the plain LoRA that a PiSSA is kept as, by the settings that the refusal gives."""
    folder, (_, expected) = write(arch, name, tmp_path / "a"), trained(arch, name)
    backbone, spec = backbone_of(arch, torch.float64), trial_called(name).peft

    def started(spec: PeftBase) -> Adapter:
        with exact_fp64():
            fresh = build_adapter(spec, backbone, seed=9, dtype=backbone.dtype, device=CPU)
            start_from(spec, fresh, folder, backbone, base_sha256=None)
        return fresh

    if isinstance(spec, Lora) and spec.pissa:
        with pytest.raises(AdapterError, match="another adapter than the job's peft says") as caught:
            started(spec)
        settings = yaml.safe_load(str(caught.value.hint).removeprefix("set the job's peft to the folder's: "))
        assert settings["type"] == "lora" and settings["r"] == 2 * spec.r
        spec = Lora(**settings)
    torch.testing.assert_close(our_logits(backbone, started(spec)), expected, rtol=1e-12, atol=1e-12)


def test_ia3_goes_on_where_the_same_modules_are_scaled_alike(tmp_path: Path) -> None:
    """Square linears have vectors of the same shape either way: which side is scaled is judged too."""
    backbone, folder = backbone_of("llama"), tmp_path / "a"
    own = IA3(target_modules=("o_proj", "k_proj"), feedforward_modules=("o_proj",))
    adapter = build_adapter(own, backbone, seed=0, dtype=torch.float32, device=CPU)
    write_adapter(folder, payload(own, adapter, backbone), MANIFEST)
    for spec in (own, IA3(target_modules=("self_attn.o_proj", "k_proj"), feedforward_modules=("self_attn.o_proj",))):
        start_from(spec, adapter, folder, backbone, base_sha256=None)
    for other in (
        IA3(),
        IA3(target_modules=("o_proj", "k_proj")),
        IA3(target_modules=("o_proj", "k_proj"), feedforward_modules=()),
    ):
        with pytest.raises(AdapterError, match=r"another adapter .*feedforward_modules") as caught:
            start_from(other, adapter, folder, backbone, base_sha256=None)
        assert "{type: ia3}, and feedforward_modules to those of its adapter_config.json" in str(caught.value)


def test_the_configs_say_no_more_than_peft_has_always_known(tmp_path: Path) -> None:
    config = json.loads((write("gpt2", "ia3", tmp_path / "a") / "adapter_config.json").read_text())
    assert config["target_modules"] == ["c_attn", "mlp.c_proj"] and config["feedforward_modules"] == ["mlp.c_proj"]
    assert config["fan_in_fan_out"] is True
    assert set(config) <= set(peft.IA3Config().to_dict())
    assert json.loads((write("llama", "dora", tmp_path / "b") / "adapter_config.json").read_text())["use_dora"] is True
    pissa = json.loads((write("llama", "pissa", tmp_path / "c") / "adapter_config.json").read_text())
    assert (pissa["r"], pissa["lora_alpha"], pissa["init_lora_weights"]) == (8, 32, True)


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        (("h.0.proj",), ("h.0.k_proj",), ["h.0.proj"]),
        (("h.0.mlp.proj", "h.1.mlp.proj"), ("h.0.k_proj",), ["h.0.mlp.proj", "h.1.mlp.proj"]),
        (("h.0.down",), ("h.0.k_proj",), ["down"]),
    ],
)
def test_feedforward_modules_are_found_by_pefts_endings(
    inputs: tuple[str, ...], outputs: tuple[str, ...], expected: list[str]
) -> None:
    found = ia3_type._endings(inputs, outputs, [*inputs, *outputs])
    assert found == expected
    assert {name for name in (*inputs, *outputs) if name.endswith(tuple(found))} == set(inputs)


# Strangers' folders


def edit_config(folder: Path, **changes: JsonValue) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def refused(folder: Path, match: str) -> None:
    with pytest.raises(AdapterError, match=match):
        read_stored(folder, backbone_of("llama"), base_sha256=None)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"task_type": "SEQ_CLS"}, "task_type"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"auto_mapping": {"base_model_class": "X", "parent_library": "os"}}, "auto_mapping"),
        ({"use_something_new": True}, "use_something_new"),
        ({"init_ia3_weights": "gaussian"}, "init_ia3_weights"),
        ({"fan_in_fan_out": 1}, "fan_in_fan_out"),
        ({"target_modules": "(a+)+$"}, "pattern"),
        ({"target_modules": [".*"]}, "literal"),
        ({"target_modules": ["query"]}, "name no linear layer of this model"),
        ({"target_modules": ["k_proj", "v_proj"]}, "do not fit this model"),
        ({"target_modules": ["k_proj", "v_proj", "down_proj", "q_proj"]}, "2 tensors are missing"),
        ({"feedforward_modules": ".*mlp.*"}, "pattern"),
        ({"feedforward_modules": ["(a+)+"]}, "literal"),
        ({"feedforward_modules": None}, "feedforward_modules is not set"),
        ({"feedforward_modules": []}, "adapter_config.json need"),
        ({"feedforward_modules": ["proj"]}, "adapter_config.json need"),
    ],
)
def test_an_ia3_config_is_believed_in_nothing(tmp_path: Path, changes: dict[str, JsonValue], match: str) -> None:
    folder = write("llama", "ia3", tmp_path / "a")
    edit_config(folder, **changes)
    refused(folder, match)


FIRST = f"{PREFIX}model.layers.0.self_attn.k_proj.ia3_l"


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda t: t.update({FIRST: t[FIRST].T.contiguous()}), "adapter_config.json need"),
        (lambda t: t.update({FIRST: t[FIRST].double()}), "F64"),
        (lambda t: t[FIRST].fill_(float("nan")), "NaN"),
        (lambda t: t.pop(FIRST), "missing"),
        (lambda t: t.update({f"{FIRST}.weight": torch.ones(2)}), "only tensors named"),
        (lambda t: t.update({f"{PREFIX}lm_head.ia3_l": torch.ones(320, 1)}), "no linear layer 'lm_head'"),
        (lambda t: t.update({FIRST.replace("k_proj", "q_proj"): torch.ones(64, 1)}), "do not select"),
    ],
)
def test_ia3_tensors_are_believed_in_nothing(
    tmp_path: Path, edit: Callable[[dict[str, Tensor]], object], match: str
) -> None:
    folder = write("llama", "ia3", tmp_path / "a")
    edit_tensors(folder, edit)
    refused(folder, match)


def test_a_dora_must_say_that_it_is_one(tmp_path: Path) -> None:
    folder = write("llama", "dora", tmp_path / "a")
    edit_config(folder, use_dora=False)
    refused(folder, "it is of a DoRA, and adapter_config.json does not say use_dora")
    edit_config(folder, use_dora=True)
    edit_tensors(folder, lambda tensors: tensors.pop(next(key for key in tensors if "magnitude" in key)))
    refused(folder, "1 tensors are missing")


def test_a_pissa_of_pefts_own_changed_its_base_and_is_refused(tmp_path: Path) -> None:
    model = peft.get_peft_model(
        tiny_model("llama"),
        peft.LoraConfig(r=4, init_lora_weights="pissa", target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )
    model.save_pretrained(tmp_path)
    refused(tmp_path, "init_lora_weights = 'pissa' is refused: this initialisation may have changed")


# vLLM


@pytest.mark.parametrize(("name", "flags"), [("rslora", ()), ("lora", ()), ("pissa", ()), ("pissa-drop", ())])
def test_vllm_serves_what_is_a_plain_lora(name: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    report = check_vllm(write("llama", name, tmp_path / "a"), linear_sizes(tiny_model("llama")))
    assert report.ok and report.flags == ("--enable-lora", *flags)


@pytest.mark.parametrize(("name", "words"), [("dora", "DoRA is not supported"), ("ia3", "LoRA only is served")])
def test_vllm_refuses_the_others_for_one_reason(name: str, words: str, tmp_path: Path) -> None:
    report = check_vllm(write("llama", name, tmp_path / "a"), linear_sizes(tiny_model("llama")))
    assert len(report.problems) == 1 and words in report.problems[0]


def test_ia3_on_other_modules_goes_there_and_back(tmp_path: Path) -> None:
    """Named targets; feed-forward ones by role, by name, or none; and all linears at once."""
    backbone = backbone_of("opt")
    for number, spec in enumerate(
        (
            IA3(target_modules=("q_proj", "fc2")),
            IA3(target_modules=("q_proj", "fc1", "fc2"), feedforward_modules=("fc1",)),
            IA3(target_modules=("out_proj", "fc2"), feedforward_modules=()),
            IA3(target_modules="all-linear"),
            IA3(target_modules=("layers.1.fc1",), feedforward_modules=("fc1",)),
        )
    ):
        adapter = build_adapter(spec, backbone, seed=0, dtype=torch.float32, device=CPU)
        folder = tmp_path / str(number)
        write_adapter(folder, payload(spec, adapter, backbone), MANIFEST)
        stored = read_stored(folder, backbone, base_sha256=None)
        again = build_adapter(stored.spec, backbone, seed=0, dtype=torch.float32, device=CPU)
        assert again.layout == adapter.layout
        kinds = {name: type(module) for name, module in adapter.modules.items()}
        assert kinds == {name: type(module) for name, module in again.modules.items()}
        model = peft.PeftModel.from_pretrained(tiny_model("opt"), folder)
        scaled = {
            name.removeprefix("base_model.model."): module.is_feedforward
            for name, module in model.named_modules()
            if hasattr(module, "is_feedforward")
        }
        assert scaled == {name: kind.__name__ == "InputScale" for name, kind in kinds.items()}


def test_ia3_refuses_what_it_does_not_find() -> None:
    backbone = backbone_of("llama")
    for spec, words in (
        (IA3(target_modules=("query",)), "'query'"),
        (IA3(feedforward_modules=("q_proj",)), "'q_proj'"),
        (IA3(target_modules=("k_proj",), feedforward_modules=("down_proj",)), "'down_proj'"),
    ):
        with pytest.raises(AdapterError, match=words):
            build_adapter(spec, backbone, seed=0, dtype=torch.float32, device=CPU)
