"""What is loaded is the folder's model: complete, finite, frozen, without dropout; or the load says what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from muxtune.errors import ModelError
from muxtune.models.sources import ModelFolder, resolve
from muxtune.models.weights import load_model, weights_hash
from tests.tiny import SUPPORTED, attention_of, tiny_folder

IDS = torch.arange(3, 43)[None]


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def load(path: Path, arch: str = "llama", layers: int | None = None) -> PreTrainedModel:
    folder = ModelFolder(str(path), path, "someone/tiny", "", path.parent / "cache")
    return load_model(
        folder, dtype=torch.float32, device="cpu", attn_implementation=attention_of(arch), num_hidden_layers=layers
    )


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("arch", SUPPORTED)
def test_it_is_the_model_that_transformers_loads_frozen_and_for_ever_without_dropout(arch: str, tmp_path: Path) -> None:
    path = tiny_folder(tmp_path / "model", arch)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention_of(arch)).eval()
    model = load(path, arch)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        expected = plain(IDS).logits
        assert torch.equal(model(IDS).logits, expected)
        model.train()  # GPT-2 and OPT would drop here, OPT whole layers
        for seed in range(3):
            torch.manual_seed(seed)
            assert torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2", "opt"])
def test_a_cut_keeps_the_first_layers_as_they_are(arch: str, tmp_path: Path) -> None:
    path = tiny_folder(tmp_path / "model", arch, layers=3)
    whole, cut = dict(load(path, arch).named_parameters()), load(path, arch, layers=2)
    assert cut.config.num_hidden_layers == 2
    if arch == "gemma3":
        assert cut.config.layer_types == ["sliding_attention", "full_attention"]
    kept = dict(cut.named_parameters())
    assert len(kept) < len(whole)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in kept.items())
    with torch.no_grad():
        assert cut(IDS).logits.isfinite().all()


@pytest.mark.parametrize("layers", [0, -1, 3])
def test_a_cut_to_layers_that_are_not_there_is_refused(layers: int, tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match=f"cannot keep {layers} layers of 2"):
        load(tiny_llama, layers=layers)


def test_weights_are_neither_made_up_nor_left_out(folder: Path) -> None:
    name, extra = "model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.bias"
    spoils: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
        (lambda tensors: tensors.pop(name), f"lacks: {name}"),
        (lambda tensors: tensors.update({extra: torch.ones(64)}), f"does not use: {extra}"),
        (lambda tensors: tensors.update({name: torch.ones(3, 3)}), "shape"),
    ]
    for number, (spoil, message) in enumerate(spoils):
        copy = Path(shutil.copytree(folder, folder.with_name(f"copy-{number}")))
        change_weights(copy, spoil)
        with pytest.raises(ModelError, match=message):
            load(copy)


def test_a_bare_model_s_unused_bias_is_seen_too(tmp_path: Path) -> None:
    """Old checkpoints of GPT-2 name their tensors without the leading "transformer."."""
    path = tiny_folder(tmp_path / "model", "gpt2")

    def bare(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    change_weights(path, bare)
    load(path, "gpt2")
    change_weights(path, lambda tensors: tensors.update({"h.0.mlp.c_fc.scale": torch.ones(3)}))
    with pytest.raises(ModelError, match=r"h\.0\.mlp\.c_fc\.scale"):
        load(path, "gpt2")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, folder: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    change_weights(folder, lambda tensors: tensors[name].view(-1)[7:8].fill_(value))
    with pytest.raises(ModelError, match=name):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "no_such_thing"}, "'no_such_thing' is not known to transformers"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"hidden_act": "no_such_thing"}, "cannot use the weights"),
        ({"hidden_size": "wide"}, "cannot use config.json"),
    ],
)
def test_a_config_that_makes_no_decoder_is_refused(change: dict[str, object], message: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        load(folder)


@pytest.mark.parametrize("arch", ["llama", "llama-tied"])
def test_the_hash_of_the_model_is_the_hash_of_its_folder(arch: str, tmp_path: Path) -> None:
    folder = resolve(str(tiny_folder(tmp_path / "model", arch)), cache_dir=tmp_path / "cache")
    model = load_model(folder, dtype=torch.float32, device="cpu", attn_implementation="sdpa")
    before = weights_hash(model)
    assert before == folder.weights_sha256 == weights_hash(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.view(-1).view(torch.int32)[5] ^= 1
    assert weights_hash(model) != before


def test_the_hash_of_a_folder_follows_its_files(folder: Path, tmp_path: Path) -> None:
    found = resolve(str(folder), cache_dir=tmp_path / "cache")
    before = found.weights_sha256
    change_weights(folder, lambda tensors: tensors["model.norm.weight"].add_(1))
    assert found.weights_sha256 != before
