"""Two ranks and one device come to the same: losses, gradients, norms and adapters of every type that has a rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from muxtune.spec.peft import IA3, BitFit, Bottleneck, LnTuning, Lora, PrefixTuning, PromptTuning
from tests.engine.prompts import PeftTrial
from tests.parallel.ranks import RankGroup
from tests.parallel.trained import Options, assert_equal, on_one, on_rank

TOLERANCE = 1e-9


def _trials() -> list[PeftTrial]:
    """A task of each type, and of each side that a target may have."""
    return [
        PeftTrial("lora", Lora(r=4), [3, 20, 7, 12], max_grad_norm=0.5, seed=1),
        PeftTrial("drop", Lora(r=8, lora_dropout=0.3, use_rslora=True), [10, 31, 2], batch=1, seed=2, chunk_tokens=24),
        PeftTrial("ia3", IA3(), [7, 19, 3], batch=3, seed=6),
        PeftTrial("bitfit", BitFit(), [5, 14, 3], batch=3, weight_decay=0.1, seed=9),
        PeftTrial("houlsby", Bottleneck(placement="houlsby", bottleneck_size=5), [11, 2, 6], batch=2, seed=7),
        PeftTrial("norms", LnTuning(), [16, 4, 22], batch=3, seed=10, chunk_tokens=24),
        PeftTrial("prefix", PrefixTuning(num_virtual_tokens=5), [4, 18, 2, 9], batch=2, seed=12),
        PeftTrial("prompt", PromptTuning(num_virtual_tokens=3), [6, 12, 2], batch=3, seed=13, chunk_tokens=32),
    ]


LLAMA_ONLY = [
    PeftTrial("head", Lora(r=4, lora_dropout=0.2, target_modules=("lm_head", "down_proj")), [9, 5], batch=2, seed=3),
    PeftTrial("sides", IA3(target_modules=("o_proj", "q_proj"), feedforward_modules=("q_proj",)), [9, 6], seed=5),
    PeftTrial("parallel", Bottleneck(placement="parallel", bottleneck_size=8), [7, 16], batch=2, seed=14),
]


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama-uneven", Options()),
        ("llama", Options(recompute=True)),
        ("llama", Options(plain=True)),
        ("gpt2", Options()),
        ("qwen2", Options()),
    ],
    ids=["uneven", "recomputed", "plain", "gpt2", "qwen2"],
)
def test_two_ranks_equal_one_device(
    arch: str, options: Options, pair: RankGroup, folder: Callable[[str], Path]
) -> None:
    trials = _trials() + (LLAMA_ONLY if "llama" in arch else [])
    pair.tell(on_rank, folder(arch), trials, options)
    expected = on_one(folder(arch), trials, options)
    for found in pair.answers():
        assert found.keys() == expected.keys()
        for name, outcome in found.items():
            assert_equal(outcome, expected[name], TOLERANCE)
