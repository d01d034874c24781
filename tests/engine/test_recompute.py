"""Recomputation: the same bits for every PEFT type, from a fraction of the activations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from muxtune.engine.engine import Engine
from muxtune.models.backbone import Backbone
from muxtune.models.memory import footprint
from muxtune.spec.peft import LnTuning, Lora, PeftBase, PrefixTuning
from tests.engine import runs
from tests.engine.build import backbone_of, exact
from tests.engine.cast import ARCHS, cast
from tests.engine.prompts import PeftTrial
from tests.engine.selective import Result, attach, train
from tests.peak import peak_bytes
from tests.tiny import SUPPORTED, tiny_folder

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@cache
def _together(arch: str, dtype: torch.dtype, recompute: bool) -> dict[str, Result]:
    return train(backbone_of(arch, dtype), cast(arch), recompute=recompute)


def _assert_same_bits(one: Result, other: Result) -> None:
    assert one.losses == other.losses and all(map(math.isfinite, one.losses)) and len(one.losses) == 3
    assert one.grad_norms == other.grad_norms and all(norm > 0 for norm in one.grad_norms)
    assert all(torch.equal(one.values[name], other.values[name]) for name in one.values)
    assert all(torch.equal(one.moments[name], other.moments[name]) for name in one.moments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_type_trains_to_the_same_bits_with_it(arch: str, dtype: torch.dtype) -> None:
    """All types in one pass; a prefix (reports.md 27), a prompt, norms and a whole MLP's adapter among them."""
    for name, kept in _together(arch, dtype, False).items():
        _assert_same_bits(_together(arch, dtype, True)[name], kept)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("arch", ARCHS)
def test_all_types_together_are_each_alone_bit_for_bit(arch: str, recompute: bool) -> None:
    backbone = backbone_of(arch)
    for trial in cast(arch):
        alone = train(backbone, [trial], recompute=recompute)[trial.name]
        _assert_same_bits(_together(arch, torch.float32, recompute)[trial.name], alone)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_plain_twins_agree_with_each_other(arch: str) -> None:
    """Where everything goes through autograd, too, a parameter's gradient is not added twice."""
    backbone = backbone_of(arch)
    kept, again = (train(backbone, cast(arch), plain=True, recompute=on) for on in (False, True))
    for name in kept:
        _assert_same_bits(again[name], kept[name])


@pytest.mark.parametrize("arch", [arch for arch in SUPPORTED if arch not in ARCHS])
def test_every_other_family_gives_the_same_gradient(arch: str) -> None:
    types: tuple[PeftBase, ...] = (Lora(lora_dropout=0.2), LnTuning(), PrefixTuning(num_virtual_tokens=3))
    trials = [PeftTrial(spec.type, spec, [5, 30, 13], seed=seed) for seed, spec in enumerate(types)]
    backbone = backbone_of(arch)
    kept, again = (_gradients(backbone, trials, recompute) for recompute in (False, True))
    assert all(bool(gradient.any()) for gradient in kept)
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


def _gradients(backbone: Backbone, trials: Sequence[PeftTrial], recompute: bool) -> list[torch.Tensor]:
    engine = Engine(backbone, recompute=recompute)
    tasks = [attach(engine, trial) for trial in trials]
    engine.forward_backward({task: list(task.data.train) for task in tasks})
    return [task.adapter.parameters.gradient.clone() for task in tasks]


class _Counted:
    """A block that notes how often it has run."""

    def __init__(self, backbone: Backbone) -> None:
        self.runs: Counter[int] = Counter()
        for index, block in enumerate(backbone.blocks):
            backbone.blocks[index] = self._counted(index, block)

    def _counted(self, index: int, block: object) -> object:
        counter = self

        class Counting:
            def forward(self, *arguments: object, **keywords: object) -> object:
                counter.runs[index] += 1
                return block.forward(*arguments, **keywords)

        return Counting()


def test_blocks_run_twice_where_something_trains_and_once_elsewhere() -> None:
    """Nothing below the lowest adapter takes part in the backward pass, nor does a pass without gradients."""
    backbone = backbone_of(layers=4)
    engine = Engine(backbone, recompute=True)
    trial = PeftTrial("top", Lora(target_modules=("layers.2.mlp.up_proj",)), [9, 12])
    counted = _Counted(backbone)
    task = attach(engine, trial)
    engine.forward({task: list(trial.examples)})
    assert counted.runs == {0: 1, 1: 1, 2: 1, 3: 1}
    counted.runs.clear()
    engine.forward_backward({task: list(trial.examples)})
    assert counted.runs == {0: 1, 1: 1, 2: 2, 3: 2}


def _peak_bytes(recompute: bool, layers: int) -> int:
    """The most that a training pass holds beyond what was there before it."""
    engine = Engine(backbone_of(layers=layers), recompute=recompute)
    tasks = [attach(engine, PeftTrial("lora", Lora(), [64] * 4)), attach(engine, PeftTrial("norms", LnTuning(), [64]))]
    batches = {task: list(task.data.train) for task in tasks}
    engine.forward_backward(batches)  # whatever is made once
    return peak_bytes(lambda: engine.forward_backward(batches))


def test_a_layer_more_costs_its_input_rows_only() -> None:
    """Of each layer that is kept, 320 rows hold several times their input."""
    rows_bytes = 320 * 48 * 4
    kept, again = ((_peak_bytes(recompute, 10) - _peak_bytes(recompute, 4)) / 6 for recompute in (False, True))
    assert kept > 10 * rows_bytes
    assert again == pytest.approx(rows_bytes, rel=0.25)
    assert _peak_bytes(True, 10) < 0.5 * _peak_bytes(False, 10)


def test_a_pass_that_raises_on_its_way_back_leaves_nothing_behind() -> None:
    """The step is tried again and comes out as if nothing had happened."""
    backbone = backbone_of()
    engine = Engine(backbone, recompute=True)
    trial = PeftTrial("lora", Lora(), [9, 12])
    task = attach(engine, trial)
    first, whole = backbone.blocks[0], engine.schedule([task.participant()])

    class Failing:
        runs = 0

        def forward(self, *arguments: object, **keywords: object) -> object:
            Failing.runs += 1
            if Failing.runs == 2:
                raise RuntimeError("on the way back")
            return first.forward(*arguments, **keywords)

    backbone.blocks[0] = Failing()
    with pytest.raises(RuntimeError, match="on the way back"):
        engine.execute(whole)
    assert backbone.slot.current is None and not task.has_pending
    assert not task.adapter.parameters.gradient.any()
    (loss,) = [action.step.loss for action in engine.execute(whole).actions if action.step is not None]
    with exact(backbone.dtype):
        assert loss == train(backbone_of(), [trial])["lora"].losses[0]


def test_a_run_that_does_not_fit_otherwise_recomputes_and_says_so(
    data: Path, disk: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose free memory is above what recomputation needs and below what the run would else."""
    model = tiny_folder(disk / "model", "llama", layers=12)
    needs = footprint(model, torch.float32)
    wide = 512  # rows of the widest chunk: the budget, which a batch of 100 fills
    changes = {"max_steps": 2, "num_train_epochs": 1, "per_device_train_batch_size": 100}
    between = needs.recomputed().activation_bytes(wide, 60) * 3 // 2
    assert between < 0.7 * needs.activation_bytes(wide, 60)
    ended, runs_of_blocks = {}, Counter[str]()
    block = type(backbone_of().blocks[0])
    forward = block.forward
    for name, free in (("roomy", 10**9), ("tight", needs.weights_bytes + 500_000 + between)):
        monkeypatch.setattr("muxtune.engine.training.memory_here", lambda device, free=free: (0, free))

        def counted(*arguments: object, name: str = name, **keywords: object) -> object:
            runs_of_blocks[name] += torch.is_grad_enabled()
            return forward(*arguments, **keywords)

        monkeypatch.setattr(block, "forward", counted)
        run = runs.run_of(model, disk / name, [runs.job(data, "sql", **changes)])
        events = runs.train(run, cache_dir=cache)
        warnings = [event.message for event in events if getattr(event, "kind", None) == "warning"]
        told = [message for message in warnings if "memory" in message]
        ended[name] = (told, runs.losses_of(events, "sql"), runs.bits(disk / name / "sql"))
    assert ended["roomy"][0] == [] and [message[:19] for message in ended["tight"][0]] == ["memory is too small"]
    assert ended["roomy"][1:] == ended["tight"][1:]
    assert runs_of_blocks["tight"] == 2 * runs_of_blocks["roomy"] > 0
