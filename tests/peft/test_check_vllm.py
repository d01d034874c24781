"""What vLLM refuses, or worse, serves as the bare base model (vLLM issues 9280, 32599, 7441)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from muxtune.data.manifest import JsonValue
from muxtune.errors import AdapterError
from muxtune.peft.check_vllm import check_vllm
from muxtune.peft.convert import PREFIX
from muxtune.peft.lora_config import LoraFormat
from tests.peft.adapters import linear_sizes, random_pairs, write_lora
from tests.tiny import tiny_model

BASE = tiny_model("llama-tied")
SIZES = linear_sizes(BASE)
MODULE = "model.layers.0.self_attn.q_proj"


def adapter(tmp_path: Path, r: int = 4) -> Path:
    return write_lora(tmp_path / "a", BASE, random_pairs(SIZES, ("_proj",), r=r), LoraFormat(r, 8))


@pytest.mark.parametrize("arch", ["llama", "llama-tied", "qwen2", "gpt2"])
def test_what_we_write_is_served(arch: str, tmp_path: Path) -> None:
    base = tiny_model(arch)
    sizes = linear_sizes(base)
    report = check_vllm(write_lora(tmp_path / "a", base, random_pairs(sizes, list(sizes)), LoraFormat(4, 8)), sizes)
    assert report.ok and report.problems == ()


@pytest.mark.parametrize(
    ("r", "flags"),
    [
        (4, ("--enable-lora",)),
        (16, ("--enable-lora",)),
        (17, ("--enable-lora", "--max-lora-rank", "32")),
        (257, ("--enable-lora", "--max-lora-rank", "320")),
        (512, ("--enable-lora", "--max-lora-rank", "512")),
    ],
)
def test_flags_cover_the_rank(tmp_path: Path, r: int, flags: tuple[str, ...]) -> None:
    report = check_vllm(adapter(tmp_path, r), SIZES)
    assert report.ok and report.flags == flags


def test_a_rank_above_the_largest_is_a_problem(tmp_path: Path) -> None:
    assert "above 512" in check_vllm(adapter(tmp_path, 513), SIZES).problems[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias"),
        ({"lora_bias": True}, "bias"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"peft_type": "IA3"}, "LoRA only is served; export it merged, if"),
        ({"r": 8}, "r is 8 but the tensors have rank 4"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"target_modules": None}, "target_modules"),
    ],
)
def test_config_problems_are_named(tmp_path: Path, changes: dict[str, JsonValue], words: str) -> None:
    path = adapter(tmp_path) / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    problems = check_vllm(path.parent, SIZES).problems
    assert len(problems) == 1 and words in problems[0]
    assert "vLLM" not in problems[0], "whoever prints them says of whom they are"


@pytest.mark.parametrize(
    ("kind", "merges"),
    [("IA3", True), ("SHIRA", True), ("MUXTUNE_BOTTLENECK", False), ("PREFIX_TUNING", False), ("OTHER", False)],
)
def test_a_merged_export_is_advised_where_the_type_can_be_merged(kind: str, merges: bool, tmp_path: Path) -> None:
    path = adapter(tmp_path) / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"peft_type": kind}))
    (problem,) = check_vllm(path.parent, SIZES).problems
    assert ("export it merged" in problem) is merges


def renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], object]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if old in key]:
            tensors[key.replace(old, new)] = tensors.pop(key)

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.update({f"{PREFIX}lm_head.weight": torch.ones(2)}), "not lora_A or lora_B weights"),
        (lambda t: t.update({f"{PREFIX}lm_head.base_layer.weight": torch.ones(2)}), "not lora_A or lora_B weights"),
        (lambda t: t.update({f"{PREFIX}score.weight": torch.ones(2)}), "not lora_A or lora_B weights"),
        (
            lambda t: t.update({f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.ones(2)}),
            "tensors on the embedding or the head are not loaded: model.embed_tokens.lora_embedding_A",
        ),
        (lambda t: t.update({f"{PREFIX}{MODULE}.lora_A.weight": torch.ones(())}), "not lora_A or lora_B weights"),
        (renamed(MODULE, "lm_head"), "embedding or the head are not loaded: lm_head"),
        (renamed(MODULE, "model.embed_tokens"), "embedding or the head are not loaded: model.embed_tokens"),
        (renamed(MODULE, "layers.0.self_attn.q_proj"), "silently: layers.0.self_attn.q_proj"),
        (renamed("model.layers.1", "model.layers.9"), "and 2 more"),
        (renamed(f"{PREFIX}{MODULE}", f"model.{MODULE}"), "not lora_A or lora_B weights"),
        (lambda t: t.pop(f"{PREFIX}{MODULE}.lora_B.weight"), f"missing: {MODULE}"),
    ],
)
def test_tensor_problems_are_named(
    tmp_path: Path, edit: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    path = adapter(tmp_path) / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
    assert words in check_vllm(path.parent, SIZES).problems[0]


def test_an_empty_adapter_is_the_bare_base(tmp_path: Path) -> None:
    path = adapter(tmp_path) / "adapter_model.safetensors"
    save_file({}, path)
    assert "bare base model" in check_vllm(path.parent, SIZES).problems[0]


def test_a_folder_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="missing"):
        check_vllm(tmp_path, SIZES)
