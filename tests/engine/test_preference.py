"""DPO: equal to its loss on transformers + peft, alone and beside others, whatever the split and the PEFT type."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from muxtune.engine.engine import Engine
from muxtune.engine.preference import compare
from muxtune.engine.rounds import run_round
from muxtune.engine.task import Sequences, Task, participant_of
from muxtune.errors import DataError, StateError
from muxtune.models import attention
from muxtune.peft.dropout import keep_mask, row_keys
from muxtune.peft.registry import build_adapter
from muxtune.plan.legal import parts_pair, require_legal
from muxtune.plan.round import Participant, derive_round
from muxtune.plan.types import LossSpec, MicroBatch, RoundSchedule, SequenceRef, WorkItem
from muxtune.spec.peft import Lora
from tests.engine.build import CPU, backbone_of, exact, run
from tests.engine.pairs import SFT, TYPES, Outcome, PairTrial, attach, random_pairs, train
from tests.reference import ReferenceTask, random_lora
from tests.reference_dpo import DpoResult, batches_of, train_dpo
from tests.sequences import random_sequences
from tests.tiny import tiny_model

LORA = PairTrial("lora", Lora(r=4, lora_alpha=8), steps=5, seed=3)
DROP = PairTrial("drop", Lora(r=4, lora_alpha=8, lora_dropout=0.3), batch=3, steps=4, beta=0.1, seed=4, chunk_tokens=40)
# Chunks smaller than its pairs, and than most of its sequences.
PARTED = PairTrial("parted", Lora(r=4, lora_alpha=8, lora_dropout=0.2), steps=5, seed=5, chunk_tokens=8)
CHUNKS = {"lora": 60, "drop": 9, "dora": 16, "prefix": 10, "prompt": 12}


def _reference(arch: str, trial: PairTrial) -> DpoResult:
    def mask(attach_name: str, example: int, positions: torch.Tensor, step: int, channels: int) -> torch.Tensor:
        place = positions.numpy()
        keys = row_keys(trial.seed, step - 1, place * 0 + example, place, CPU)
        return keep_mask(keys, attach_name, channels, trial.peft.lora_dropout)

    model = tiny_model(arch, dtype=torch.float64)
    attention.register()
    adapter = build_adapter(trial.peft, backbone_of(arch), seed=0, dtype=torch.float32, device=CPU)
    drawn = random_lora(backbone_of(arch).model, r=trial.peft.r, seed=trial.seed)
    task = ReferenceTask(
        batches_of(trial.examples, trial.batch, trial.steps),
        {name: drawn[name] for name in adapter.modules},
        r=trial.peft.r,
        lora_alpha=trial.peft.lora_alpha,
        targets=sorted({name.rpartition(".")[2] for name in adapter.modules}),
        learning_rate=trial.learning_rate,
        max_grad_norm=trial.max_grad_norm,
        lora_dropout=trial.peft.lora_dropout,
        dropout_mask=mask,
    )
    with exact(torch.float64):
        return train_dpo(model, task, trial.beta)


def _ours(arch: str, trials: list[PairTrial], beside: bool) -> dict[str, tuple[Outcome, dict[str, torch.Tensor]]]:
    backbone = backbone_of(arch, torch.float64)
    found = {}
    with exact(torch.float64):
        engine = Engine(backbone)
        tasks = [attach(engine, trial) for trial in trials]
        for task, trial in zip(tasks, trials, strict=True):
            drawn = random_lora(backbone.model, r=trial.peft.r, seed=trial.seed)
            task.adapter.load_pairs({name: drawn[name] for name in task.adapter.modules})
        if beside:
            attach(engine, SFT)
        steps = run(engine)
        for task in tasks:
            found[task.name] = (Outcome(steps[task.name], torch.empty(0), {}), dict(task.adapter.pairs()))
    return found


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "mixed with sft"])
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_it_is_the_published_loss_on_transformers_and_peft(arch: str, beside: bool) -> None:
    trials = [LORA, DROP, PARTED]
    ours = _ours(arch, trials, beside) if beside else {t.name: _ours(arch, [t], False)[t.name] for t in trials}
    for trial in trials:
        theirs = _reference(arch, trial)
        outcome, pairs = ours[trial.name]
        near = partial(pytest.approx, rel=1e-9, abs=1e-12)
        assert len(outcome.steps) == trial.steps and theirs.losses[0] != theirs.losses[-1]
        assert [step.loss for step in outcome.steps] == near(theirs.losses)
        assert [step.grad_norm for step in outcome.steps] == near(theirs.grad_norms)
        assert [step.accuracy for step in outcome.steps] == theirs.accuracies
        rewards = [step.rewards for step in outcome.steps]
        assert [(one.chosen, one.rejected) for one in rewards if one] == [near(both) for both in theirs.rewards]
        for name, pair in theirs.adapter.items():
            for mine, other in zip(pairs[name], pair, strict=True):
                assert float((mine - other).norm()) <= 1e-9 * float(other.norm())


@pytest.fixture(scope="module")
def mixed() -> dict[str, Outcome]:
    """Every PEFT type on pairs, and sft beside them, in one pass."""
    return train(backbone_of("llama"), [*(_trial(name) for name in TYPES), SFT])


def _trial(name: str) -> PairTrial:
    return PairTrial(name, TYPES[name], steps=2, batch=3, seed=len(name), chunk_tokens=CHUNKS.get(name))


@pytest.mark.parametrize("name", [*TYPES, "sft"])
def test_alone_is_mixed_bit_for_bit(name: str, mixed: dict[str, Outcome]) -> None:
    alone = train(backbone_of("llama"), [SFT if name == "sft" else _trial(name)])[name]
    assert alone.numbers == mixed[name].numbers and alone.steps
    assert torch.equal(alone.values, mixed[name].values)
    assert all(torch.equal(value, mixed[name].moments[key]) for key, value in alone.moments.items())
    assert (alone.steps[0].rewards is None) == (name == "sft")


@pytest.mark.parametrize("name", TYPES)
def test_a_parted_pair_is_the_whole_one(name: str) -> None:
    """Steps and an evaluation, chunk budgets from one pass for all down to a few tokens."""
    backbone, trial = backbone_of("llama", torch.float64), dataclasses.replace(_trial(name), steps=1)
    found = []
    with exact(torch.float64):
        for chunk_tokens in (1000, 21, 6):
            engine = Engine(backbone)
            task = engine.attach(trial.job, Sequences(trial.examples, trial.examples[2:8]), chunk_tokens=chunk_tokens)
            start = task.adapter.parameters.values
            with torch.no_grad():  # somewhere else than at its start, where every margin is zero
                start += 0.05 * torch.randn(start.shape, generator=torch.Generator().manual_seed(2), dtype=start.dtype)
            task.adapter.refresh()
            evaluated = run_round(engine, [task.validation_participant()], "eval").items(task.name)
            (step,) = run(engine)[task.name]
            found.append((task.adapter.parameters.values.clone(), step, evaluated))
    values, whole, (one_pass,) = found[0]
    for own_values, step, items in found[1:]:
        assert step.loss == pytest.approx(whole.loss, rel=1e-10) and step.tokens == whole.tokens
        assert step.accuracy == whole.accuracy and step.grad_norm == pytest.approx(whole.grad_norm, rel=1e-9)
        assert float((own_values - values).norm()) <= 1e-9 * float(values.norm())
        assert len(items) > 1 and sum(item.loss_sum for item in items) == pytest.approx(one_pass.loss_sum, rel=1e-10)
        assert sum(item.correct for item in items) == one_pass.correct
        assert sum(item.pairs.pairs for item in items if item.pairs) == 3


@pytest.mark.parametrize("name", TYPES)
def test_the_plain_twin_agrees(name: str) -> None:
    backbone = backbone_of("llama", torch.float64)
    fast, plain = (train(backbone, [_trial(name)], plain=plain)[name] for plain in (False, True))
    assert [step.loss for step in fast.steps] == pytest.approx([step.loss for step in plain.steps], rel=1e-10)
    assert float((fast.values - plain.values).norm()) <= 1e-9 * float(plain.values.norm())


def test_the_weights_are_the_gradient_of_the_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    counts, spec = [3, 1, 0, 4, 2, 2], LossSpec(5, "dpo", 0.7)
    logprob_n = (-3 * torch.rand(sum(counts), generator=generator, dtype=torch.float64)).requires_grad_()
    references = (-4 * torch.rand(6, generator=generator, dtype=torch.float64)).tolist()
    sums = [part.sum() for part in logprob_n.split(counts)]
    rewards = [0.7 * (total - reference) for total, reference in zip(sums, references, strict=True)]
    margins = torch.stack([rewards[0] - rewards[1], rewards[2] - rewards[3], rewards[4] - rewards[5]])
    loss = -F.logsigmoid(margins).sum()
    (gradient,) = torch.autograd.grad(loss / spec.denominator, logprob_n)
    loss, margins = loss.detach(), margins.detach()
    found = compare(logprob_n.detach().numpy(), counts, references, spec)
    assert found.loss_sum == pytest.approx(float(loss), rel=1e-13)
    assert torch.allclose(-torch.from_numpy(found.weight_n), gradient, rtol=1e-12, atol=0)
    assert found.preferred == int((margins > 0).sum())
    assert found.sums.chosen - found.sums.rejected == pytest.approx(float(margins.sum()), rel=1e-12)


@pytest.mark.parametrize("margin", [-2000.0, -1.0, 0.0, 3.0, 2000.0])
def test_far_margins_stay_numbers(margin: float) -> None:
    found = compare(torch.tensor([margin, 0.0], dtype=torch.float64).numpy(), [1, 1], [0.0, 0.0], LossSpec(1, "dpo", 1))
    assert found.loss_sum == pytest.approx(max(0.0, -margin) + math.log1p(math.exp(-abs(margin))))
    assert found.weight_n[0] == -found.weight_n[1] and 0 <= found.weight_n[0] <= 1
    assert found.preferred == (margin > 0)


def test_a_margin_that_is_no_number_is_told_of() -> None:
    for broken in (math.nan, math.inf):
        found = compare(
            torch.tensor([-broken, 1.0], dtype=torch.float64).numpy(), [1, 1], [0.0, 0.0], LossSpec(1, "dpo", 1)
        )
        assert not math.isfinite(found.loss_sum)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_every_split_gives_the_same_gradient_and_the_same_loss(dropout: float) -> None:
    """The mean is over the pairs of the whole batch, whatever chunks it comes in."""
    backbone = backbone_of("llama", torch.float64)
    trial = PairTrial("only", Lora(r=4, lora_dropout=dropout), batch=5)
    found = {}
    for budget, chunks in {1000: 1, 70: 2, 24: 16}.items():
        with exact(torch.float64):
            engine = Engine(backbone)
            task = attach(engine, dataclasses.replace(trial, chunk_tokens=budget))
            passes = engine.schedule([task.participant()]).actions
            assert sum(isinstance(action, MicroBatch) for action in passes) == chunks
            item = engine.forward_backward({task: trial.examples})["only"]
            gradient = task.adapter.parameters.gradient.clone()
            step = engine.optim_step(task)
        assert item.pairs is not None and item.terms == item.pairs.pairs == 5
        assert step.loss == item.loss_sum / 5 and step.pairs == item.pairs
        found[budget] = (gradient, step.loss)
    for gradient, loss in found.values():
        assert loss == pytest.approx(found[1000][1], rel=1e-12)
        assert float((gradient - found[1000][0]).norm()) <= 1e-12 * float(gradient.norm())


def test_steps_and_epochs_go_by_pairs() -> None:
    job = PairTrial("only", Lora(), batch=2).job.model_copy(update={"max_steps": None, "num_train_epochs": 2})
    engine = Engine(backbone_of())
    task = engine.attach(job, Sequences(random_pairs([3] * 5, [(2, 2)] * 5, seed=1)))
    assert (task.total_steps, task.sampler.steps_per_epoch) == (6, 3)
    taken = [[ref.index for chunk in _at(task, step).chunks for ref in chunk] for step in range(3)]
    assert taken == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [_at(task, step).denominator for step in range(3)] == [2, 2, 1]


def _at(task: Task, step: int) -> Participant:
    task.step = step
    return task.participant()


def test_half_a_pair_is_refused() -> None:
    engine = Engine(backbone_of())
    trial = PairTrial("only", Lora())
    with pytest.raises(DataError, match="9 sequences are not whole pairs"):
        engine.attach(trial.job, Sequences(trial.examples[:-1]))
    task = attach(engine, trial)
    with pytest.raises(DataError, match="3 sequences are not whole pairs"):
        engine.forward_backward({task: trial.examples[:3]})
    assert not task.has_pending
    assert len(engine.forward({task: trial.examples[:3]})["only"].logprobs or ()) == 3 + 8 + 12


@pytest.mark.parametrize(
    ("places", "message"),
    [((1, 2), "whole pairs"), ((0, 3), "whole pairs"), ((0,), "have been scored"), ((0, 1), "known")],
)
def test_a_schedule_that_parts_a_pair_or_knows_no_reference_is_refused(places: tuple[int, ...], message: str) -> None:
    engine = Engine(backbone_of())
    task = attach(engine, PairTrial("only", Lora()))
    refs = tuple(SequenceRef(place, len(task.data.train[place])) for place in places)
    item = WorkItem("only", "train", task.train_source, refs, LossSpec(1, "dpo", 0.1))
    with pytest.raises(StateError, match=message):
        engine.execute(RoundSchedule(0, (MicroBatch(0, 0, (item,)),)))


def test_a_task_that_goes_astray_takes_nobody_with_it() -> None:
    wild = dataclasses.replace(LORA, name="wild", learning_rate=1e30)
    backbone = backbone_of("llama")
    alone, beside = train(backbone, [SFT]), train(backbone, [wild, SFT])
    assert len(beside["wild"].steps) < wild.steps
    assert beside["sft"].numbers == alone["sft"].numbers
    assert torch.equal(beside["sft"].values, alone["sft"].values)


@settings(max_examples=60)
@given(
    tasks=st.lists(
        st.tuples(st.lists(st.integers(2, 60), min_size=1, max_size=8), st.integers(1, 150), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    fuse_tokens=st.integers(1, 300),
)
def test_no_schedule_parts_a_pair(tasks: list[tuple[list[int], int, bool]], fuse_tokens: int) -> None:
    """Whatever the lengths, budgets and co-runners; and every pair comes once."""
    participants, expected = [], {}
    for number, (lengths, budget, pairs) in enumerate(tasks):
        job = (PairTrial(str(number), Lora()) if pairs else dataclasses.replace(SFT, name=str(number))).job
        sequences = random_sequences([*lengths, *lengths], seed=number)
        indices = range(len(sequences))
        participants.append(participant_of(job, f"{number}/train", sequences, indices, budget, job.group_size))
        expected[str(number)] = list(indices)
    schedule = derive_round(1, participants, policy="fuse-all", fuse_tokens=fuse_tokens)
    require_legal(schedule)
    for task, indices in expected.items():
        items = [item for action in schedule.actions if isinstance(action, MicroBatch) for item in action.items]
        own = [item for item in items if item.task == task]
        trained = [ref for item in own if item.kind == "train" for ref in item.sequences]
        assert sorted({ref.index for ref in trained}) == indices
        if tasks[int(task)][2]:
            whole = [item for item in own if not parts_pair(item)]
            assert all(len(item.sequences) % 2 == 0 and not any(ref.cut for ref in item.sequences) for item in whole)
            assert all(item.kind != "carry" for item in own)
            assert {item.loss for item in own} == {LossSpec(len(indices) // 2, "dpo", 0.5)}
