"""Two ranks and one device come to the same: losses, gradients, norms and adapters of every type that has a rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from muxtune.engine.engine import Engine
from muxtune.engine.task import Sequences
from muxtune.parallel.mesh import ALONE, Sum, TensorAxis
from muxtune.parallel.tensor import load_sharded
from muxtune.spec.peft import IA3, BitFit, Bottleneck, LnTuning, Lora, PrefixTuning, PromptTuning, Shira
from tests.engine.build import CPU
from tests.engine.pairs import PairTrial
from tests.engine.prompts import PeftTrial
from tests.parallel.ranks import RankGroup
from tests.parallel.trained import Options, assert_equal, on_one, on_rank

TOLERANCE = 1e-9


def all_trials() -> list[PeftTrial | PairTrial]:
    """A task of each type, and of each side that a target may have."""
    return [
        PAIRS,
        PeftTrial("lora", Lora(r=4), [3, 20, 7, 12], max_grad_norm=0.5, seed=1),
        PeftTrial("drop", Lora(r=8, lora_dropout=0.3, use_rslora=True), [10, 31, 2], batch=1, seed=2, chunk_tokens=24),
        PeftTrial("dora", Lora(r=4, use_dora=True), [8, 13, 21], batch=2, seed=15, max_grad_norm=0.4),
        PeftTrial("dora-drop", Lora(r=3, use_dora=True, lora_dropout=0.3), [17, 4, 9], batch=2, seed=16),
        PeftTrial("pissa", Lora(r=3, init_lora_weights="pissa", lora_dropout=0.2), [5, 12, 8], batch=3, seed=17),
        PeftTrial("shira", Shira(r=3), [6, 11, 15], batch=2, seed=18, weight_decay=0.1),
        PeftTrial("ia3", IA3(), [7, 19, 3], batch=3, seed=6),
        PeftTrial("bitfit", BitFit(), [5, 14, 3], batch=3, weight_decay=0.1, seed=9),
        PeftTrial("houlsby", Bottleneck(placement="houlsby", bottleneck_size=5), [11, 2, 6], batch=2, seed=7),
        PeftTrial("norms", LnTuning(), [16, 4, 22], batch=3, seed=10, chunk_tokens=24),
        PeftTrial("prefix", PrefixTuning(num_virtual_tokens=5), [4, 18, 2, 9], batch=2, seed=12),
        PeftTrial("prompt", PromptTuning(num_virtual_tokens=3), [6, 12, 2], batch=3, seed=13, chunk_tokens=32),
    ]


PAIRS = PairTrial("pairs", Lora(r=4, lora_dropout=0.1), max_grad_norm=0.3, seed=4, chunk_tokens=24)
LLAMA_ONLY = [
    PeftTrial("head", Lora(r=4, lora_dropout=0.2, target_modules=("lm_head", "down_proj")), [9, 5], batch=2, seed=3),
    PeftTrial("ends", Lora(r=3, target_modules=("embed_tokens", "lm_head", "v_proj")), [9, 5, 13], batch=2, seed=19),
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
    trials = all_trials() + (LLAMA_ONLY if "llama" in arch else [])
    pair.tell(on_rank, folder(arch), trials, options)
    expected = on_one(folder(arch), trials, options)
    for found in pair.answers():
        assert found.keys() == expected.keys()
        for name, outcome in found.items():
            assert_equal(outcome, expected[name], TOLERANCE)


@pytest.mark.parametrize("arch", ["mistral", "qwen3", "gemma2", "gemma3-two", "opt", "opt-350m", "llama-tied"])
def test_other_families_with_lora(arch: str, pair: RankGroup, folder: Callable[[str], Path]) -> None:
    """Windows, soft caps, scaled embeddings, norms after the sum, projections beside the layers, tied tables."""
    trials: list[PeftTrial | PairTrial] = [
        PeftTrial("lora", Lora(r=4), [3, 20, 7, 12], max_grad_norm=0.5, seed=1),
        PeftTrial("drop", Lora(r=3, lora_dropout=0.3), [10, 31, 2], batch=1, seed=2, chunk_tokens=24),
        PeftTrial("embed", Lora(r=2, target_modules=("embed_tokens",)), [10, 4], batch=2, seed=3),
    ]
    pair.tell(on_rank, folder(arch), trials, Options(together=3, fuse_tokens=1))
    expected = on_one(folder(arch), trials, Options())
    for found in pair.answers():
        for name, outcome in found.items():
            assert_equal(outcome, expected[name], TOLERANCE)


@pytest.mark.full
def test_three_ranks_equal_one_device(folder: Callable[[str], Path]) -> None:
    """One K/V head each."""
    group, trials = RankGroup(3), all_trials() + LLAMA_ONLY
    try:
        expected = on_one(folder("llama-uneven"), trials, Options())
        for found in group.ask(on_rank, folder("llama-uneven"), trials, Options()):
            for name, outcome in found.items():
                assert_equal(outcome, expected[name], TOLERANCE)
    finally:
        group.close()


@dataclass(frozen=True, slots=True)
class Counting(TensorAxis):
    """An axis that notes the size of each exchange, and changes nothing."""

    sizes: list[int] = field(default_factory=list)

    def sum_(self, value: Tensor) -> Tensor:
        """As it is."""
        self.sizes.append(value.numel())
        return value

    def start_sum(self, value: Tensor) -> Sum:
        """As it is."""
        return Sum(self.sum_(value), ALONE)

    def max_(self, value: Tensor) -> Tensor:
        """As it is."""
        return self.sum_(value)


def test_adapters_cost_no_exchange_but_one_a_step(folder: Callable[[str], Path]) -> None:
    """Two a layer and direction, whatever hooks it; nothing flows back below the first layer's norm."""
    layers, axis = 2, Counting(0, 2)
    backbone = load_sharded(folder("llama"), axis, dtype=torch.float64, device=CPU)
    engine = Engine(backbone)
    trials = [PeftTrial("one", Lora(r=2), [5, 6]), PeftTrial("two", IA3(), [9, 4], batch=2)]
    tasks = [engine.attach(trial.job, Sequences(trial.examples)) for trial in trials]
    engine.forward({task: task.data.train for task in tasks})
    embedding, loss = 1, 2
    assert len(axis.sizes) == embedding + 2 * layers + loss
    axis.sizes.clear()
    engine.forward_backward({task: task.data.train for task in tasks})
    of_rows, back = 1, 2 * layers - 1
    assert len(axis.sizes) == embedding + 2 * layers + loss + of_rows + back
    for task in tasks:
        axis.sizes.clear()
        engine.optim_step(task)
        (size,) = axis.sizes
        views, placements = task.adapter.parameters.views, engine.sharded[task.name].placements
        assert size == 1 + sum(views[name].numel() for name, kind in placements.items() if kind == "partial")
