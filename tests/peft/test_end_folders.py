"""Folders of LoRA on the embedding and the head: the real peft loads ours and gives the same logits, we load peft's
(with the base weights that it saves beside them), strangers' are judged before they are believed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import peft
import pytest
import torch
from peft.utils import PeftType
from safetensors.torch import load_file, save_file
from torch import Tensor

from muxtune.engine.head import hooked_rows
from muxtune.errors import AdapterError
from muxtune.models.attach import Pass
from muxtune.models.attention import AttentionContext, Segment
from muxtune.models.backbone import Backbone
from muxtune.models.skeleton import skeleton
from muxtune.peft.base import Adapter, Dispatch
from muxtune.peft.check_vllm import check_vllm
from muxtune.peft.convert import PREFIX
from muxtune.peft.folder import write_adapter
from muxtune.peft.multiplex import hooks
from muxtune.peft.registry import build_adapter, give, payload, read_stored
from muxtune.spec.peft import Lora
from tests.engine.build import CPU, backbone_of
from tests.engine.ends import ARCHS, embedding_of, on_ends
from tests.engine.linears import start_state
from tests.engine.prompts import PeftTrial
from tests.exact import exact_fp64
from tests.peft.adapters import MANIFEST, linear_sizes
from tests.reference_linears import named_parameters, peft_config
from tests.tiny import tiny_folder, tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
]
NAMES = ("both", "embedding", "head")
IDS_T = torch.randint(0, 320, (16,), generator=torch.Generator().manual_seed(3))


def trial_of(arch: str, name: str) -> PeftTrial:
    return next(trial for trial in on_ends(arch) if trial.name == name)


def adapter_of(backbone: Backbone, spec: Lora, state: dict[str, Tensor]) -> Adapter:
    adapter = build_adapter(spec, backbone, seed=0, dtype=backbone.dtype, device=CPU)
    give(adapter, state, where="test")
    return adapter


def our_logits(backbone: Backbone, adapter: Adapter) -> Tensor:
    whole = [Dispatch(0, 16, adapter, None)]
    with torch.no_grad(), exact_fp64():
        current = Pass(AttentionContext([Segment(16)]), hooks(whole, joined=backbone.groups))
        hidden_TD = backbone.hidden(IDS_T, torch.arange(16), current)
        return backbone.head.logits(hidden_TD, hooked_rows(whole, backbone.head))


def logits_of(model: peft.PeftModel) -> Tensor:
    with torch.no_grad(), exact_fp64():
        found: Tensor = model.eval()(IDS_T[None], use_cache=False).logits[0]
    return found


@cache
def trained(arch: str, name: str) -> tuple[Adapter, Tensor]:
    """An adapter some way from its start, on fp64, and its logits."""
    backbone, trial = backbone_of(arch, torch.float64), trial_of(arch, name)
    assert isinstance(trial.peft, Lora)
    adapter = adapter_of(backbone, trial.peft, start_state(backbone_of(arch), trial))
    return adapter, our_logits(backbone, adapter)


def write(arch: str, name: str, dest: Path) -> Path:
    adapter, _ = trained(arch, name)
    write_adapter(dest, payload(trial_of(arch, name).peft, adapter, backbone_of(arch)), MANIFEST)
    return dest


def write_pefts(arch: str, name: str, dest: Path) -> peft.PeftModel:
    """The same adapter made and saved by peft."""
    state = start_state(backbone_of(arch), trial_of(arch, name))
    targets = sorted({point.rpartition(".")[0].rpartition(".")[2] for point in state})
    config = peft_config(trial_of(arch, name).peft, tiny_model(arch), state)
    config.target_modules = set(targets)  # as a user names them; peft looks for its own names of the ends among these
    model = peft.get_peft_model(tiny_model(arch), config)
    with torch.no_grad():
        for point, parameter in named_parameters(model).items():
            if point in state:
                parameter.copy_(state[point])
    model.save_pretrained(dest)
    return model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ARCHS)
def test_peft_loads_what_we_write_and_gives_the_same_logits(arch: str, name: str, tmp_path: Path) -> None:
    folder = write(arch, name, tmp_path / "a")
    base = tiny_model(arch, dtype=torch.float64)
    with torch.no_grad(), exact_fp64():
        bare = base(IDS_T[None]).logits[0]
    model = peft.PeftModel.from_pretrained(base, folder)
    assert model.peft_config["default"].peft_type is PeftType.LORA
    answer = model.load_adapter(folder, adapter_name="again")
    assert not answer.unexpected_keys and not [key for key in answer.missing_keys if ".again" in key]
    adapter, expected = trained(arch, name)
    adapted = {point for point, module in base.named_modules() if hasattr(module, "lora_A")}
    assert adapted == set(adapter.modules)
    state = adapter.state()
    loaded = {
        name.removeprefix("base_model.model.").replace(".default", "").removesuffix(".weight"): value
        for name, value in model.named_parameters()
        if ".default" in name
    }
    assert loaded.keys() == state.keys() and all(bool(value.any()) for value in loaded.values())
    assert all(torch.equal(value.double(), state[point]) for point, value in loaded.items())
    model.set_adapter("default")
    torch.testing.assert_close(logits_of(model.double()), expected, rtol=1e-9, atol=1e-9)
    assert float((expected - bare).abs().max()) > 0.05, "the adapter must matter, or nothing is shown"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ARCHS)
def test_we_read_what_we_write(arch: str, name: str, tmp_path: Path) -> None:
    folder = write(arch, name, tmp_path / "a")
    stored = read_stored(folder, backbone_of(arch), base_sha256="ab" * 32)
    adapter, expected = trained(arch, name)
    assert all(torch.equal(value.double(), adapter.state()[point]) for point, value in stored.values.items())
    backbone = backbone_of(arch, torch.float64)
    assert isinstance(stored.spec, Lora)
    assert torch.equal(our_logits(backbone, adapter_of(backbone, stored.spec, dict(stored.values))), expected)
    assert stored.spec.use_rslora == (name == "embedding")
    targets = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    ends = {embedding_of(arch), "lm_head"} if name == "both" else {"lm_head" if name == "head" else embedding_of(arch)}
    assert ends <= set(targets) and len(targets) == len(adapter.modules)


@pytest.mark.parametrize(
    ("arch", "name"),
    [("llama", "both"), ("llama-tied", "both"), ("gpt2", "both"), ("gemma3", "embedding"), ("opt-350m", "head")],
)
def test_we_read_what_peft_writes(arch: str, name: str, tmp_path: Path) -> None:
    model = write_pefts(arch, name, tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert any(key.endswith("base_layer.weight") for key in saved), "peft saved base weights beside it"
    stored = read_stored(tmp_path, backbone_of(arch), base_sha256="ff" * 32)
    assert isinstance(stored.spec, Lora) and not any("base_layer" in point for point in stored.values)
    backbone = backbone_of(arch, torch.float64)
    ours = our_logits(backbone, adapter_of(backbone, stored.spec, dict(stored.values)))
    torch.testing.assert_close(ours, logits_of(model.double()), rtol=1e-9, atol=1e-9)


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


A, B = (f"{PREFIX}model.embed_tokens.lora_embedding_{half}" for half in "AB")
HEAD_A, BASE = f"{PREFIX}lm_head.lora_A.weight", f"{PREFIX}model.embed_tokens.base_layer.weight"


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda t: t.update({A: t[A].T.contiguous()}), r"'.*lora_embedding_A' is \[320, 4\], .* need \[4, 320\]"),
        (lambda t: t.update({A: t[A].double()}), "F64"),
        (lambda t: t[A].fill_(float("nan")), "NaN"),
        (lambda t: t[HEAD_A].fill_(float("inf")), "NaN"),
        (lambda t: t.pop(B), "missing"),
        (lambda t: t.pop(HEAD_A), "missing"),
        (lambda t: t.update({f"{A}.weight": t.pop(A)}), "only tensors named"),
        (lambda t: t.update({A.replace("_embedding_A", "_A.weight"): t.pop(A)}), "do not select|do not fit"),
        (lambda t: t.update({BASE: torch.zeros(320, 48)}), "is not the weight of this base model"),
        (lambda t: t.update({BASE: torch.zeros(321, 48)}), r"need \[320, 48\]"),
        (lambda t: t.update({f"{PREFIX}model.embed_tokens.weight": torch.zeros(320, 48)}), "only tensors named"),
        (lambda t: t.update({f"{PREFIX}model.norm.base_layer.weight": torch.zeros(48)}), "beside an adapter on"),
    ],
)
def test_tensors_on_the_ends_are_believed_in_nothing(
    tmp_path: Path, edit: Callable[[dict[str, Tensor]], object], match: str
) -> None:
    folder = write("llama", "both", tmp_path / "a")
    edit_tensors(folder, edit)
    with pytest.raises(AdapterError, match=match):
        read_stored(folder, backbone_of("llama"), base_sha256=None)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, "do not fit this model"),
        ({"target_modules": ["embed_tokens", "lm_head", "q_proj"]}, "tensors are missing"),
        ({"target_modules": "all-linear"}, "do not fit this model"),
        ({"layers_to_transform": [1]}, "do not fit this model"),
        ({"use_dora": True}, "a DoRA on 'model.embed_tokens' is not supported|a DoRA on 'lm_head' is not supported"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"r": 8}, "adapter_config.json need"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ],
)
def test_a_config_on_the_ends_is_believed_in_nothing(tmp_path: Path, changes: dict[str, object], match: str) -> None:
    folder = write("llama", "both", tmp_path / "a")
    edit_config(folder, **changes)
    with pytest.raises(AdapterError, match=match):
        read_stored(folder, backbone_of("llama"), base_sha256=None)


def test_saved_base_weights_may_be_of_another_precision(tmp_path: Path) -> None:
    """A model in bf16 has the numbers of its fp32 base, rounded; the other way round they are the same numbers."""
    folder, weight = write("llama", "embedding", tmp_path / "a"), tiny_model("llama").get_input_embeddings().weight
    backbones = backbone_of("llama"), backbone_of("llama", torch.bfloat16), Backbone(skeleton(_base(tmp_path)))
    for saved in (weight.detach().clone(), weight.detach().bfloat16()):
        edit_tensors(folder, lambda tensors, saved=saved: tensors.update({BASE: saved}))
        for backbone in backbones:
            read_stored(folder, backbone, base_sha256=None)
    edit_tensors(folder, lambda tensors: tensors.update({BASE: (1.01 * weight).detach()}))
    for backbone in backbones[:2]:
        with pytest.raises(AdapterError, match="is not the weight of this base model"):
            read_stored(folder, backbone, base_sha256=None)


def _base(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "base", "llama")


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("both", ["lm_head.lora_A.weight", "model.embed_tokens.lora_embedding_A"]),
        ("embedding", ["model.embed_tokens.lora_embedding_A", "model.embed_tokens.lora_embedding_B"]),
        ("head", ["lm_head.lora_A.weight", "lm_head.lora_B.weight"]),
    ],
)
def test_vllm_will_not_load_them_and_the_tensors_are_named(name: str, tensors: Sequence[str], tmp_path: Path) -> None:
    (problem,) = check_vllm(write("llama", name, tmp_path / "a"), linear_sizes(tiny_model("llama"))).problems
    assert problem.startswith("tensors on the embedding or the head are not loaded: ") and all(
        tensor in problem for tensor in tensors
    )
