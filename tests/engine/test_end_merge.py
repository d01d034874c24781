"""Merging LoRA on the embedding and the head: the merged model answers as base + adapter do, tied weights or not."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from muxtune.engine.load import load_backbone
from muxtune.engine.merge import merge_adapter
from muxtune.errors import AdapterError
from tests.engine.build import backbone_of
from tests.engine.ends import embedding_of, on_ends
from tests.engine.linears import start_state
from tests.engine.test_merge import logits, written
from tests.models.merging import load, model_folder
from tests.tiny import tiny_folder

CASES = [
    *((arch, name) for arch in ("llama", "llama-tied") for name in ("both", "embedding", "head")),
    *(("gpt2", "both"), ("gemma2", "head"), ("gemma3", "embedding"), ("opt-350m", "both")),
]
TIED = {"llama-tied", "gpt2", "gemma2", "gemma3", "opt-350m"}
pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
]


def adapter_on(arch: str, name: str, dest: Path) -> tuple[Path, dict[str, Tensor]]:
    trial = next(trial for trial in on_ends(arch) if trial.name == name)
    state = start_state(backbone_of(arch), trial)
    return written(arch, trial.peft, state, dest), state


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_merged_answers_as_base_and_adapter_in_peft(arch: str, name: str, tmp_path: Path) -> None:
    base = model_folder(tiny_folder(tmp_path / "base", arch), tmp_path)
    adapter, state = adapter_on(arch, name, tmp_path / "a")
    report = merge_adapter(adapter, base, tmp_path / "merged")
    assert report.difference is not None and report.effect is not None
    assert report.difference < 1e-4 < 0.01 < report.effect

    merged, plain = load(tmp_path / "merged"), load(base.path)
    beside = peft.PeftModel.from_pretrained(load(base.path), adapter).eval()
    torch.testing.assert_close(logits(merged), logits(beside), rtol=1e-4, atol=1e-4)
    assert float((logits(merged) - logits(plain)).abs().max()) > 0.05, "the adapter must matter"

    assert plain.config.tie_word_embeddings == (arch in TIED) and not merged.config.tie_word_embeddings
    embedding, head = merged.get_input_embeddings().weight, merged.get_output_embeddings().weight
    assert embedding.data_ptr() != head.data_ptr()
    changed = {point.rpartition(".")[0].rpartition(".")[2] for point in state}
    assert torch.equal(embedding, plain.get_input_embeddings().weight) is (embedding_of(arch) not in changed)
    assert torch.equal(head, plain.get_output_embeddings().weight) is ("lm_head" not in changed)
    assert report.changed_tensors == len(changed)
    added = load_file(tmp_path / "merged/model.safetensors").keys() - load_file(base.path / "model.safetensors").keys()
    assert added == ({"lm_head.weight"} if arch in TIED else set())


def test_a_merged_model_is_a_base_of_its_own(tmp_path: Path) -> None:
    """Untied, it loads here, and takes the next adapter."""
    base = model_folder(tiny_folder(tmp_path / "base", "llama-tied"), tmp_path)
    merge_adapter(adapter_on("llama-tied", "head", tmp_path / "a")[0], base, tmp_path / "once")
    once = model_folder(tmp_path / "once", tmp_path)
    backbone = load_backbone(once, device="cpu", dtype="fp32")
    assert not torch.equal(backbone.head.table, backbone.embedding.table)
    merge_adapter(adapter_on("llama-tied", "embedding", tmp_path / "b")[0], once, tmp_path / "twice")
    head = load(tmp_path / "twice").get_output_embeddings().weight
    assert torch.equal(head, backbone.head.table)


def test_a_tied_model_stays_tied_where_neither_end_changes(tmp_path: Path) -> None:
    base = model_folder(tiny_folder(tmp_path / "base", "llama-tied"), tmp_path)
    adapter, _ = adapter_on("llama-tied", "both", tmp_path / "a")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["target_modules"] = [name for name in config["target_modules"] if name.endswith("q_proj")]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    path = adapter / "adapter_model.safetensors"
    save_file({key: value for key, value in load_file(path).items() if "self_attn" in key}, path)
    merge_adapter(adapter, base, tmp_path / "merged")
    assert load(tmp_path / "merged").config.tie_word_embeddings
    assert "lm_head.weight" not in load_file(tmp_path / "merged/model.safetensors")


def test_base_weights_of_another_model_beside_the_adapter_are_found_out(tmp_path: Path) -> None:
    """The first reading has no weights to compare with; the check of the logits has."""
    base = model_folder(tiny_folder(tmp_path / "base", "llama"), tmp_path)
    adapter, _ = adapter_on("llama", "embedding", tmp_path / "a")
    path = adapter / "adapter_model.safetensors"
    other = torch.ones(320, 48)
    save_file({**load_file(path), "base_model.model.model.embed_tokens.base_layer.weight": other}, path)
    with pytest.raises(AdapterError, match="is not the weight of this base model"):
        merge_adapter(adapter, base, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
