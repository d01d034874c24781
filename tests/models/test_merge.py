"""Merged export: an ordinary model folder whose outputs are those of base + adapter, or no folder at all."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from muxtune.errors import AdapterError, ModelError
from muxtune.models import merge_check
from muxtune.models.merge import merge_into
from muxtune.models.sources import ModelFolder
from muxtune.peft.lora_config import LoraFormat
from muxtune.peft.lora_convert import read_lora
from tests.models.merging import changes_of, load, merge, model_folder
from tests.peft.adapters import Pairs, adapted_logits, linear_sizes, random_pairs, some_ids, write_lora
from tests.tiny import tiny_folder, tiny_model

CASES = {
    "llama": ("_proj",),
    "llama-tied": ("q_proj", "down_proj"),
    "qwen2": ("q_proj", "k_proj", "v_proj"),
    "gpt2": ("c_attn", "c_fc", "c_proj"),
    "opt": ("q_proj", "fc1"),
    "gemma3": ("o_proj", "gate_proj"),
}


def pairs_of(arch: str, targets: tuple[str, ...] | None = None) -> Pairs:
    return random_pairs(linear_sizes(tiny_model(arch)), targets or CASES[arch])


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(some_ids()).logits
    return found


@pytest.mark.parametrize("arch", CASES)
def test_merged_equals_peft_and_plain_arithmetic(arch: str, tmp_path: Path) -> None:
    base = model_folder(tiny_folder(tmp_path / "base", arch), tmp_path)
    pairs = pairs_of(arch)
    adapter = write_lora(tmp_path / "a", tiny_model(arch), pairs, LoraFormat(4, 10, fan_in_fan_out=arch == "gpt2"))
    loaded = read_lora(adapter, linear_sizes(tiny_model(arch)))
    report = merge(base, loaded.tensors, tmp_path / "merged", scale=loaded.form.scale)

    merged = logits(load(tmp_path / "merged"))
    by_peft = logits(peft.PeftModel.from_pretrained(load(base.path), adapter).eval())
    exact = adapted_logits(tiny_model(arch, dtype=torch.float64), pairs, 2.5, some_ids())
    own_error = float((by_peft - exact).abs().max())
    assert float((merged - exact).abs().max()) <= 3 * own_error + 1e-6
    assert float((logits(load(base.path)) - exact).abs().max()) > 0.1, "the adapter must matter, or nothing is shown"
    assert report.changed_tensors == len(pairs)
    assert report.difference is not None and report.effect is not None
    assert report.difference < 1e-4 < 0.1 < report.effect


def test_only_targeted_weights_change(tmp_path: Path) -> None:
    base = model_folder(tiny_folder(tmp_path / "base", "gpt2"), tmp_path)
    pairs = pairs_of("gpt2", ("attn.c_proj",))
    merge_into(base, changes_of(pairs, 2.0), tmp_path / "merged", adapted=None)
    before, after = (load_file(folder / "model.safetensors") for folder in (base.path, tmp_path / "merged"))
    assert before.keys() == after.keys()
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert changed == {f"{name}.weight" for name in pairs}


def test_a_tied_head_is_not_written_twice(tmp_path: Path) -> None:
    base = model_folder(tiny_folder(tmp_path / "base", "llama-tied"), tmp_path)
    merge(base, pairs_of("llama-tied"), tmp_path / "merged", scale=1.0)
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")


@pytest.mark.parametrize("bare", [False, True], ids=["prefixed", "bare"])
@pytest.mark.parametrize("arch", ["llama", "llama-tied", "gpt2", "opt"])
def test_a_changed_head_leaves_the_embedding_as_it_is(arch: str, bare: bool, tmp_path: Path) -> None:
    """Tied weights become two, in checkpoints of the whole model and of the inner one alone."""
    model = tiny_model(arch)
    path = tiny_folder(tmp_path / "base", arch)
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    if bare:
        tensors, prefix = load_file(path / "model.safetensors"), f"{model.base_model_prefix}."
        renamed = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    head: Pairs = {"lm_head": (0.1 * torch.ones(2, 48), torch.randn(320, 2))}
    report = merge(model_folder(path, tmp_path), head, tmp_path / "merged", scale=1.0)
    assert report.changed_tensors == 1
    assert report.difference is not None and report.effect is not None and report.difference < 1e-4 < report.effect
    merged = load(tmp_path / "merged")
    assert torch.equal(merged.get_input_embeddings().weight, model.get_input_embeddings().weight)
    weight = model.get_output_embeddings().weight + head["lm_head"][1] @ head["lm_head"][0]
    torch.testing.assert_close(merged.get_output_embeddings().weight, weight)
    assert not merged.config.tie_word_embeddings
    assert bare or {"lm_head.weight", f"{embedding}.weight"} <= load_file(tmp_path / "merged/model.safetensors").keys()


def test_a_checkpoint_saved_without_its_prefix(tmp_path: Path) -> None:
    """GPT-2 on the hub names its tensors h.0..., the module is transformer.h.0..."""
    path = tiny_folder(tmp_path / "base", "gpt2")
    tensors = load_file(path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert bare.keys() != tensors.keys()
    save_file(bare, path / "model.safetensors", metadata={"format": "pt"})
    report = merge(model_folder(path, tmp_path), pairs_of("gpt2"), tmp_path / "merged", scale=2.0)
    assert report.changed_tensors == 8 and report.difference is not None and report.difference < 1e-4


def test_shards_in_and_out(tmp_path: Path) -> None:
    one = model_folder(tiny_folder(tmp_path / "one", "llama"), tmp_path)
    pairs = pairs_of("llama")
    merge(one, pairs, tmp_path / "many", scale=2.0, max_shard_bytes=60_000)
    shards = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all((tmp_path / "many" / shard).stat().st_size < 70_000 for shard in shards)

    undone = {name: (a, -b) for name, (a, b) in pairs.items()}
    merge(model_folder(tmp_path / "many", tmp_path), undone, tmp_path / "back", scale=2.0)
    assert not (tmp_path / "back" / "model.safetensors.index.json").exists()
    torch.testing.assert_close(logits(load(tmp_path / "back")), logits(load(one.path)), rtol=1e-4, atol=1e-4)


def test_the_folder_says_what_it_is_made_of(tmp_path: Path) -> None:
    base = model_folder(tiny_folder(tmp_path / "base", "llama"), tmp_path)
    adapter = write_lora(tmp_path / "a", tiny_model("llama"), pairs_of("llama"), LoraFormat(4, 8), base.path)
    extra = [adapter / "generation_config.json", adapter / "chat_template.jinja"]
    report = merge(base, pairs_of("llama"), tmp_path / "merged", scale=2.0, extra_files=extra)
    card = (tmp_path / "merged" / "README.md").read_text()
    for part in ("tests/tiny", "dequantised Q4_1", base.weights_sha256, f"{report.difference:.3g}"):
        assert part in card
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    assert GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id == [2, 0]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("wanted", [None, torch.float32])
def test_a_half_precision_base(tmp_path: Path, wanted: torch.dtype | None) -> None:
    base = model_folder(tiny_folder(tmp_path / "base", "llama", dtype=torch.bfloat16), tmp_path)
    report = merge(base, pairs_of("llama"), tmp_path / "merged", scale=2.0, dtype=wanted)
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {wanted or torch.bfloat16}
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["dtype"] == str(wanted or torch.bfloat16).removeprefix("torch.")
    assert report.difference is not None and report.effect is not None
    if wanted is None:
        assert 1e-3 < report.difference < report.effect / 4, "what bf16 costs is seen, and reported"
    else:
        assert report.difference < 1e-4


def refused(base: ModelFolder, pairs: Pairs, match: str, scale: float = 1.0) -> None:
    dest = base.path.parent / "merged"
    with pytest.raises(AdapterError, match=match):
        merge(base, pairs, dest, scale=scale)
    assert not dest.exists() and not list(dest.parent.glob(".*")), "a refused merge leaves nothing"


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    base = model_folder(tiny_folder(tmp_path / "base", "llama"), tmp_path)
    name, (a, b) = next(iter(pairs_of("llama").items()))
    refused(base, {}, "nothing to merge")
    refused(base, {name.replace("layers.0", "layers.7"): (a, b)}, "no such parameter")
    refused(base, {name: (a, torch.zeros_like(b))}, "changes no weight")
    refused(base, {name: (a, b)}, "does not fit", scale=1e39)


def test_an_untrained_module_among_trained_ones_is_no_fault(tmp_path: Path) -> None:
    base = model_folder(tiny_folder(tmp_path / "base", "llama"), tmp_path)
    pairs = pairs_of("llama")
    name = next(iter(pairs))
    pairs[name] = (pairs[name][0], torch.zeros_like(pairs[name][1]))
    assert merge(base, pairs, tmp_path / "merged", scale=1.0).changed_tensors == len(pairs) - 1


def test_a_change_lost_in_rounding_is_refused(tmp_path: Path) -> None:
    """peft issue 2586's kind: a merge that says it went well and changed nothing."""
    base = model_folder(tiny_folder(tmp_path / "base", "llama", dtype=torch.bfloat16), tmp_path)
    refused(base, pairs_of("llama"), "lost when the weight is rounded", scale=1e-9)


def test_a_merge_that_does_not_act_as_the_adapter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if transformers had read other tensors than those written: the merged folder loads as the bare base."""
    base = model_folder(tiny_folder(tmp_path / "base", "llama"), tmp_path)
    real = merge_check._load
    monkeypatch.setattr(merge_check, "_load", lambda _: real(base.path))
    refused(base, pairs_of("llama"), "would not act as the adapter does")


def test_an_existing_folder_is_not_written_over(tmp_path: Path) -> None:
    base = model_folder(tiny_folder(tmp_path / "base", "llama"), tmp_path)
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "thesis.txt").write_text("mine")
    with pytest.raises(ModelError, match="something already"):
        merge(base, pairs_of("llama"), tmp_path / "merged", scale=1.0)
