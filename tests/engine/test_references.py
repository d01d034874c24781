"""What the bare backbone thinks of a pair: computed once, for all tasks, steps, jobs and runs, and kept whole."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from muxtune.data.types import TokenSequence
from muxtune.engine.references import Asked, ReferenceCache, References, digest_of, ground_of
from muxtune.engine.runner import Runner
from muxtune.spec.event import EvalResult, StepResult
from muxtune.spec.peft import Lora, PromptTuning
from tests.engine.build import backbone_of
from tests.engine.pairs import SFT, CountingEngine, PairTrial, attach, random_pairs

TRIAL = PairTrial("one", Lora(r=4), steps=6)  # five pairs, two a step: two epochs
LENGTHS = sorted(sequence.input_tokens for sequence in TRIAL.examples)


def _engine(folder: Path | None = None) -> CountingEngine:
    references = References(ReferenceCache(folder), "ground") if folder else None
    return CountingEngine(backbone_of(), references=references)


def _run(engine: CountingEngine) -> list[tuple[str, float]]:
    return [(event.task, event.loss) for event in Runner(engine).run() if isinstance(event, StepResult)]


def test_each_sequence_is_computed_once_and_only_when_its_step_comes() -> None:
    engine = _engine()
    attach(engine, TRIAL)
    _run(engine)
    assert sorted(length for batch in engine.referred for length in batch) == LENGTHS
    assert [len(batch) for batch in engine.referred] == [4, 4, 2], "one fused pass a round of the first epoch"


def test_tasks_share_the_values_and_the_pass() -> None:
    """A sweep over beta and PEFT types on the same data computes nothing twice; other data ride in the same pass."""
    engine = _engine()
    attach(engine, TRIAL)
    attach(engine, dataclasses.replace(TRIAL, name="two", beta=0.1, peft=PromptTuning(num_virtual_tokens=3)))
    attach(engine, PairTrial("other", Lora(r=2), prompts=(50,), responses=((40, 41),), batch=1, steps=1))
    attach(engine, SFT)
    _run(engine)
    assert sorted(length for batch in engine.referred for length in batch) == sorted([*LENGTHS, 89, 90])
    assert len(engine.referred) == 3


def test_the_validation_set_is_computed_once_too() -> None:
    engine = _engine()
    held_out = random_pairs([5, 3], [(4, 2), (6, 7)], seed=9)
    job = TRIAL.job.model_copy(update={"val_set_size": 1, "eval_steps": 2})
    trial = dataclasses.replace(TRIAL)
    task = attach(engine, trial, validation=held_out)
    task.job = job
    evaluated = [event for event in Runner(engine).run() if isinstance(event, EvalResult)]
    assert [event.step for event in evaluated] == [2, 4, 6]
    assert sorted(length for batch in engine.referred for length in batch) == sorted(
        [*LENGTHS, *(sequence.input_tokens for sequence in held_out)]
    )
    last = engine.forward({task: held_out})["one"].logprobs
    assert last is not None
    engine.sources["held"] = held_out
    engine.references.missing("held", {place: Asked(one) for place, one in enumerate(held_out)})
    counts = np.cumsum([0, *(sequence.trained_tokens for sequence in held_out)])
    rewards = [
        TRIAL.beta * (sum(last[counts[i] : counts[i + 1]]) - (engine.references.value("held", i) or math.nan))
        for i in range(4)
    ]
    margins = [rewards[0] - rewards[1], rewards[2] - rewards[3]]
    event = evaluated[-1]
    assert event.loss == pytest.approx(sum(math.log1p(math.exp(-margin)) for margin in margins) / 2, rel=1e-6)
    assert event.accuracy == sum(margin > 0 for margin in margins) / 2
    assert event.rewards is not None and event.rewards.margin == pytest.approx(sum(margins) / 2, rel=1e-6)


def test_values_outlive_the_process_and_change_no_bit(tmp_path: Path) -> None:
    first = _engine(tmp_path)
    attach(first, TRIAL)
    losses = _run(first)
    assert first.referred
    again = _engine(tmp_path)
    attach(again, TRIAL)
    assert _run(again) == losses and not again.referred
    longer = _engine(tmp_path)
    attach(longer, dataclasses.replace(TRIAL, prompts=(*TRIAL.prompts, 3), responses=(*TRIAL.responses, (2, 3))))
    _run(longer)
    assert longer.referred == [[4, 5]], "what the file does not hold, alone"
    (entry,) = tmp_path.iterdir()
    assert entry.stat().st_mode & 0o777 == 0o600
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    damaged = _engine(tmp_path)
    attach(damaged, TRIAL)
    assert _run(damaged) == losses and damaged.referred


def test_what_is_told_apart() -> None:
    ids, mask = np.array([5, 6, 7], np.int32), np.array([False, True, True])
    base = digest_of(TokenSequence(0, ids, mask))
    assert base == digest_of(TokenSequence(9, ids, mask)), "not by its place"
    other_mask = np.array([False, False, True])
    assert len({base, digest_of(TokenSequence(0, ids, other_mask)), digest_of(TokenSequence(0, ids + 1, mask))}) == 3
    grounds = [ground_of("sha", dtype, threads) for dtype in (torch.float32, torch.bfloat16) for threads in (1, 2)]
    assert len({*grounds, ground_of("sha2", torch.float32, 1)}) == 5 and grounds[0] == ground_of(
        "sha", "torch.float32", 1
    )


def test_two_processes_add_to_one_file_and_nan_stays_out(tmp_path: Path) -> None:
    digests = [bytes([number]) * 32 for number in range(4)]
    one, two = (References(ReferenceCache(tmp_path), "ground") for _ in range(2))
    for part in (one, two):
        part.missing("none", {})  # both have read the empty folder
    one.learn(digests[:1], [1.0])
    one.save()
    two.learn(digests[1:], [2.0, math.nan, math.inf])
    two.save()
    assert ReferenceCache(tmp_path).load("ground") == {digests[0]: 1.0, digests[1]: 2.0}
    assert len(list(tmp_path.iterdir())) == 1


def test_it_is_written_now_and_then_and_not_each_time(tmp_path: Path) -> None:
    now = [100.0]
    references = References(ReferenceCache(tmp_path), "ground", clock=lambda: now[0])
    references.missing("none", {})
    references.learn([b"a" * 32], [1.0])
    assert not os.listdir(tmp_path)
    now[0] += 11
    references.learn([b"b" * 32], [2.0])
    assert len(ReferenceCache(tmp_path).load("ground") or ()) == 2
