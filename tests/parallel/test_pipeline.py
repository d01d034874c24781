"""Stages of a pipeline and one device come to the same, for every type; overlapped and one by one alike to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from muxtune.spec.peft import IA3, BitFit, Bottleneck, LnTuning, Lora, PrefixTuning, PromptTuning, Shira
from tests.engine.pairs import PairTrial
from tests.engine.prompts import PeftTrial
from tests.parallel.ranks import RankGroup
from tests.parallel.trained import Options, assert_equal, on_one, on_stage
from tests.tiny import tiny_folder

TOLERANCE = 1e-9


def _trials(arch: str) -> list[PeftTrial | PairTrial]:
    """A task of each type; ends and a single layer as targets; cut sequences; pairs, whole and parted."""
    found: list[PeftTrial | PairTrial] = [
        PairTrial("pairs", Lora(r=4, lora_dropout=0.1), max_grad_norm=0.3, seed=4, chunk_tokens=24),
        PeftTrial("lora", Lora(r=4), [3, 20, 7, 12], max_grad_norm=0.5, seed=1),
        PeftTrial("drop", Lora(r=8, lora_dropout=0.3, use_rslora=True), [10, 31, 2], batch=1, seed=2, chunk_tokens=24),
        PeftTrial("dora", Lora(r=4, use_dora=True), [8, 17], batch=2, seed=21),
        PeftTrial("pissa", Lora(r=4, init_lora_weights="pissa"), [8, 11], batch=2, seed=22),
        PeftTrial("ia3", IA3(), [7, 19, 3], batch=3, seed=6),
        PeftTrial("bitfit", BitFit(), [5, 14, 3], batch=3, weight_decay=0.1, seed=9),
        PeftTrial("houlsby", Bottleneck(placement="houlsby", bottleneck_size=5), [11, 2, 6], batch=2, seed=7),
        PeftTrial("norms", LnTuning(), [16, 4, 22], batch=3, seed=10, chunk_tokens=24),
        PeftTrial("shira", Shira(), [9, 12], batch=2, seed=11),
        PeftTrial("prefix", PrefixTuning(num_virtual_tokens=5), [4, 18, 2, 9], batch=2, seed=12, chunk_tokens=16),
        PeftTrial("prompt", PromptTuning(num_virtual_tokens=3), [6, 12, 2], batch=3, seed=13, chunk_tokens=32),
    ]
    head, first = ("lm_head", "embed_tokens") if "llama" in arch else ("lm_head", "wte")
    norm = "model.norm" if "llama" in arch else "transformer.ln_f"
    layers = "model.layers" if "llama" in arch else "transformer.h"
    linear = "mlp.up_proj" if "llama" in arch else "mlp.c_fc"
    return [
        *found,
        PeftTrial("head", Lora(r=4, lora_dropout=0.2, target_modules=(head,)), [9, 5], batch=2, seed=3),
        PeftTrial("ends", Lora(r=2, target_modules=(head, first)), [9, 8, 40], batch=3, seed=15, chunk_tokens=16),
        PeftTrial("above", Lora(r=2, target_modules=(f"{layers}.1.{linear}",)), [9, 8], batch=2, seed=16),
        PeftTrial("below", Lora(r=2, target_modules=(f"{layers}.0.{linear}",)), [9, 8], batch=2, seed=17),
        PeftTrial("last-norm", LnTuning(target_modules=(norm,)), [9, 8], batch=2, seed=18),
        PeftTrial("scaled", IA3(target_modules=(linear,), feedforward_modules=(linear,)), [9, 6], seed=5),
    ]


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", Options()),
        ("llama-tied", Options(recompute=True)),
        ("llama", Options(plain=True)),
        ("llama", Options(keep_tokens=64)),
        ("gpt2", Options()),
    ],
    ids=["llama", "recomputed", "plain", "kept", "gpt2"],
)
def test_two_stages_equal_one_device(
    arch: str, options: Options, pair: RankGroup, folder: Callable[[str], Path]
) -> None:
    trials = _trials(arch)
    pair.tell(on_stage, folder(arch), trials, options)
    expected = on_one(folder(arch), trials, options)
    for found in pair.answers():
        assert found.keys() == expected.keys()
        for name, outcome in found.items():
            assert_equal(outcome, expected[name], TOLERANCE)


FEW = [
    PeftTrial("lora", Lora(r=4), [3, 20, 7, 12], max_grad_norm=0.5, seed=1),
    PeftTrial("drop", Lora(r=8, lora_dropout=0.3), [10, 31, 2], batch=1, seed=2, chunk_tokens=24),
    PairTrial("pairs", Lora(r=4), seed=4, chunk_tokens=24),
]


@pytest.mark.parametrize("arch", ["gemma2", "opt", "qwen2"])
def test_other_families_with_lora(arch: str, pair: RankGroup, folder: Callable[[str], Path]) -> None:
    pair.tell(on_stage, folder(arch), FEW, Options())
    expected = on_one(folder(arch), FEW, Options())
    for found in pair.answers():
        for name, outcome in found.items():
            assert_equal(outcome, expected[name], TOLERANCE)


@pytest.mark.parametrize("options", [Options(), Options(recompute=True), Options(keep_tokens=64)], ids=str)
def test_overlapped_and_one_by_one_are_the_same_to_the_bit(
    options: Options, pair: RankGroup, folder: Callable[[str], Path]
) -> None:
    """The fast block, too: whichever the stage would choose by itself."""
    trials = _trials("llama")
    overlapped = pair.ask(on_stage, folder("llama"), trials, options, 1, "auto")
    one_by_one = pair.ask(on_stage, folder("llama"), trials, replace(options, overlap=False), 1, "auto")
    for found, twin in zip(overlapped, one_by_one, strict=True):
        assert found.keys() == twin.keys()
        for name, outcome in found.items():
            assert_equal(outcome, twin[name], 0.0)


def test_two_stages_of_two_ranks_equal_one_device(four: RankGroup, folder: Callable[[str], Path]) -> None:
    """A rank for each half of each stage."""
    _four_equal_one(four, folder("llama"), FEW, Options())


@pytest.mark.full
@pytest.mark.parametrize("arch", ["llama-uneven", "llama-tied", "gpt2", "qwen2"])
@pytest.mark.parametrize("options", [Options(), Options(recompute=True), Options(overlap=False)], ids=str)
def test_two_stages_of_two_ranks_equal_one_device_for_every_type(
    arch: str, options: Options, four: RankGroup, folder: Callable[[str], Path]
) -> None:
    """But for those that have no rule for several ranks."""
    unruled = ("dora", "pissa", "shira", "ends")
    trials = [trial for trial in _trials("gpt2" if arch == "gpt2" else "llama") if trial.name not in unruled]
    if arch == "gpt2":
        trials = [trial for trial in trials if trial.name != "scaled"]
    _four_equal_one(four, folder(arch), trials, options)


def _four_equal_one(four: RankGroup, path: Path, trials: Sequence[PeftTrial | PairTrial], options: Options) -> None:
    four.tell(on_stage, path, trials, options, 2)
    expected = on_one(path, trials, options)
    for found in four.answers():
        assert found.keys() == expected.keys()
        for name, outcome in found.items():
            assert_equal(outcome, expected[name], TOLERANCE)


@pytest.mark.full
def test_four_stages_equal_one_device(four: RankGroup, tmp_path: Path) -> None:
    """Those in the middle have no end, and hand rows, gradients, losses and norms on."""
    path = tiny_folder(tmp_path / "six", "llama", dtype=torch.float64, layers=6)
    four.tell(on_stage, path, _trials("llama"), Options())
    expected = on_one(path, _trials("llama"), Options())
    for found in four.answers():
        for name, outcome in found.items():
            assert_equal(outcome, expected[name], TOLERANCE)
