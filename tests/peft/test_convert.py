"""Our adapters in peft's format and back: the same numbers, the same modules, through the real peft."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft.utils import PeftType
from safetensors.torch import load_file

from muxtune.errors import AdapterError
from muxtune.peft.convert import PREFIX, target_modules
from muxtune.peft.lora_config import LoraFormat
from muxtune.peft.lora_convert import export_lora, read_lora
from tests.peft.adapters import Pairs, adapted_logits, linear_sizes, module_names, random_pairs, some_ids, write_lora
from tests.tiny import tiny_model

CASES = {  # architecture, targets of the adapter (path endings)
    "llama all": ("llama", ("_proj",)),
    "llama q, v": ("llama", ("q_proj", "v_proj")),
    "llama one layer": ("llama", ("layers.0.self_attn.q_proj", "layers.1.mlp.up_proj")),
    "qwen2 (biases, tied)": ("qwen2", ("q_proj", "k_proj", "o_proj", "down_proj")),
    "gpt2 (Conv1D, tied)": ("gpt2", ("c_attn", "c_fc", "c_proj")),
    "gpt2 attention c_proj alone": ("gpt2", ("attn.c_proj",)),
    "opt": ("opt", ("q_proj", "out_proj", "fc2")),
}

# What a LoRA config has had since use_dora came; an older peft fails on a key that it does not know.
CLASSIC_KEYS = {
    *("peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "target_modules", "bias", "fan_in_fan_out"),
    *("modules_to_save", "init_lora_weights", "inference_mode", "use_rslora", "use_dora", "rank_pattern"),
    *("alpha_pattern", "layers_to_transform", "layers_pattern", "revision"),
}


def test_every_case_has_its_targets() -> None:
    for arch, targets in CASES.values():
        assert random_pairs(linear_sizes(tiny_model(arch)), targets)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("use_rslora", [False, True])
def test_peft_loads_what_we_write(case: str, use_rslora: bool, tmp_path: Path) -> None:
    arch, targets = CASES[case]
    base = tiny_model(arch, dtype=torch.float64)
    pairs = random_pairs(linear_sizes(base), targets)
    form = LoraFormat(4, 10, use_rslora=use_rslora, fan_in_fan_out=arch == "gpt2")
    ids = some_ids()
    expected = adapted_logits(base, pairs, 10 / (2.0 if use_rslora else 4.0), ids)
    folder = write_lora(tmp_path / "adapter", base, pairs, form)

    model = peft.PeftModel.from_pretrained(base, folder)
    assert model.peft_config["default"].peft_type is PeftType.LORA
    # peft answers neither missing nor unexpected keys: every tensor of the file has a place, every place a tensor.
    answer = model.load_adapter(folder, adapter_name="again")
    assert not answer.unexpected_keys
    assert not [key for key in answer.missing_keys if "lora_" in key and ".again." in key]
    adapted = {name for name, module in base.named_modules() if hasattr(module, "lora_A")}
    assert adapted == set(pairs), "peft must adapt exactly the modules that were trained"
    loaded = {
        name: module.lora_B["default"].weight for name, module in base.named_modules() if hasattr(module, "lora_A")
    }
    assert all(bool(weight.abs().sum() > 0) for weight in loaded.values()), "a lora_B at its start: nothing was loaded"
    model.set_adapter("default")
    with torch.no_grad():
        logits = model.double().eval()(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_we_read_what_peft_writes(arch: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base = tiny_model(arch)
    sizes = linear_sizes(base)
    targets = ["c_attn", "mlp.c_proj"] if arch == "gpt2" else ["q_proj", "down_proj"]
    config = peft.LoraConfig(
        r=6, lora_alpha=12, lora_dropout=0.1, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False,
        fan_in_fan_out=arch == "gpt2", layers_to_transform=[1],
    )  # fmt: skip
    torch.manual_seed(5)
    model = peft.get_peft_model(base, config).to(dtype)
    model.save_pretrained(tmp_path)

    loaded = read_lora(tmp_path, sizes)
    assert loaded.form == LoraFormat(6, 12.0, 0.1, fan_in_fan_out=arch == "gpt2")
    assert loaded.manifest is None
    saved = {name: module for name, module in base.named_modules() if hasattr(module, "lora_A")}
    assert set(loaded.tensors) == set(saved) and len(saved) == 2
    for name, (lora_a_RI, lora_b_OR) in loaded.tensors.items():
        assert lora_a_RI.dtype == lora_b_OR.dtype == torch.float32
        assert torch.equal(lora_a_RI, saved[name].lora_A["default"].weight.float())
        assert torch.equal(lora_b_OR, saved[name].lora_B["default"].weight.float())


def test_we_read_what_we_write_bit_for_bit(tmp_path: Path) -> None:
    base = tiny_model("llama")
    pairs = random_pairs(linear_sizes(base), ("_proj",))
    flat = torch.cat([t.flatten() for pair in pairs.values() for t in pair])
    views: Pairs = {}
    at = 0
    for name, pair in pairs.items():  # tensors as the engine has them: views of one buffer
        rows = []
        for tensor in pair:
            rows.append(flat[at : at + tensor.numel()].view(tensor.shape))
            at += tensor.numel()
        views[name] = (rows[0], rows[1])
    folder = write_lora(tmp_path / "a", base, views, LoraFormat(4, 8.5, 0.05))

    loaded = read_lora(folder, linear_sizes(base))
    assert loaded.form == LoraFormat(4, 8.5, 0.05)
    assert loaded.tensors.keys() == pairs.keys()
    for name, pair in pairs.items():
        assert torch.equal(loaded.tensors[name][0], pair[0]) and torch.equal(loaded.tensors[name][1], pair[1])


def test_keys_that_vllm_takes_and_no_other(tmp_path: Path) -> None:
    """vLLM refuses a folder with lm_head, score or modules_to_save tensors: none but A and B are ever written."""
    base = tiny_model("llama-tied")
    folder = write_lora(tmp_path / "a", base, random_pairs(linear_sizes(base), ("_proj",)), LoraFormat(4, 8))
    keys = load_file(folder / "adapter_model.safetensors").keys()
    assert keys == {f"{PREFIX}{name}.lora_{kind}.weight" for name in linear_sizes(base) for kind in "AB"}


def test_config_holds_classic_keys_only() -> None:
    base = tiny_model("llama")
    payload = export_lora(
        random_pairs(linear_sizes(base), ("q_proj",)), LoraFormat(4, 8), module_names=module_names(base)
    )
    assert payload.config.keys() == CLASSIC_KEYS
    assert payload.config["target_modules"] == ["q_proj"]
    assert json.loads(json.dumps(payload.config))["lora_alpha"] == 8


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (("q_proj", "v_proj"), ["q_proj", "v_proj"]),
        (("layers.0.self_attn.q_proj",), ["model.layers.0.self_attn.q_proj"]),
        (("mlp.down_proj",), ["down_proj"]),
    ],
)
def test_target_modules_are_the_shortest_exact_names(targets: tuple[str, ...], found: list[str]) -> None:
    base = tiny_model("llama")
    assert target_modules(random_pairs(linear_sizes(base), targets), module_names(base)) == found


def test_a_suffix_shared_with_another_module_grows() -> None:
    base = tiny_model("gpt2")
    pairs = random_pairs(linear_sizes(base), ("attn.c_proj",))
    assert target_modules(pairs, module_names(base)) == ["attn.c_proj"]


_PART = st.sampled_from(["a", "b", "0", "1", "proj"])
_NAMES = st.sets(st.lists(_PART, min_size=1, max_size=4).map(".".join), min_size=1, max_size=12)


@given(_NAMES, st.randoms())
def test_target_modules_select_exactly_the_targets(names: set[str], random: object) -> None:
    wanted = {name for name in sorted(names) if random.random() < 0.5}  # type: ignore[attr-defined]
    try:
        found = target_modules(wanted, names)
    except AdapterError:
        assert any(other.endswith(f".{name}") for name in wanted for other in names - wanted)
        return
    selected = {name for name in names if name in found or any(name.endswith(f".{target}") for target in found)}
    assert selected == wanted


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_adapter_that_is_not_finite_is_not_exported(bad: float) -> None:
    base = tiny_model("llama")
    pairs = random_pairs(linear_sizes(base), ("q_proj",))
    next(iter(pairs.values()))[1][0, 0] = bad
    with pytest.raises(AdapterError, match="NaN or infinity"):
        export_lora(pairs, LoraFormat(4, 8), module_names=module_names(base))


def test_wrong_rank_and_empty_are_not_exported() -> None:
    pairs = random_pairs({"a.b": (8, 8)}, ("b",))
    with pytest.raises(AdapterError, match="rank differs"):
        export_lora(pairs, LoraFormat(8, 8), module_names=["a.b"])
    with pytest.raises(AdapterError, match="no tensors"):
        export_lora({}, LoraFormat(8, 8), module_names=["a.b"])
