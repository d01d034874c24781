"""Plays of many tasks, as hypothesis draws them: of any PEFT types and settings, coming and going as they like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from muxtune.data.types import TokenSequence
from muxtune.engine.engine import Engine
from muxtune.engine.task import Sequences, Task
from muxtune.models.backbone import Backbone
from muxtune.plan.types import StepOutcome
from muxtune.spec.peft import IA3, BitFit, Bottleneck, LnTuning, Lora, PeftBase, PrefixTuning, PromptTuning, Shira
from tests.engine.build import backbone_of, exact
from tests.engine.prompts import PeftTrial
from tests.engine.selective import ARCHS, LINEARS, NORMS, start_of
from tests.reference_types import MLP
from tests.tiny_tokenizer import VOCAB

ROUNDS = 5
PARALLEL = "parallel"
TYPES = (
    "lora",
    "rslora",
    "dora",
    "pissa",
    "ia3",
    "houlsby",
    "pfeiffer",
    "bitfit",
    "ln_tuning",
    "shira",
    "prefix_tuning",
    "prompt_tuning",
    PARALLEL,
)


@dataclass(frozen=True, slots=True)
class Member:
    """One task of a play. It is attached before round `joins`; it may pause for some rounds, and leave for good."""

    trial: PeftTrial
    masks: tuple[tuple[bool, ...], ...]  # of its examples: which tokens are trained, perhaps none, never the first
    joins: int = 0
    pauses: tuple[int, int] | None = None  # before which round, and before which one it comes back
    leaves: tuple[int, str] | None = None  # before which round, and how: cancel or detach

    @property
    def name(self) -> str:
        return self.trial.name

    @property
    def examples(self) -> tuple[TokenSequence, ...]:
        rng = np.random.default_rng(self.trial.seed)
        return tuple(
            TokenSequence(index, rng.integers(3, VOCAB, size=len(mask), dtype=np.int32), np.array(mask, dtype=bool))
            for index, mask in enumerate(self.masks)
        )


@dataclass(frozen=True, slots=True)
class Play:
    arch: str
    dtype: torch.dtype
    members: tuple[Member, ...]
    recompute: bool
    alone_recompute: bool  # of the solo runs that the members are held against
    fuse_tokens: int

    @property
    def backbone(self) -> Backbone:
        return _backbone(self.arch, self.dtype)


@dataclass(slots=True)
class Outcome:
    """What a task came to: its steps, and copies of its numbers at the end."""

    steps: list[StepOutcome] = field(default_factory=list)
    logprobs: tuple[float, ...] = ()
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    moments: Mapping[str, Tensor] = field(default_factory=dict)


@cache
def _backbone(arch: str, dtype: torch.dtype) -> Backbone:
    return backbone_of(arch, dtype)


@cache
def _start(arch: str, dtype: torch.dtype, peft: PeftBase, seed: int) -> dict[str, Tensor]:
    return start_of(_backbone(arch, dtype), PeftTrial("start", peft, [2], seed=seed)).state()


@st.composite
def plays(draw: st.DrawFn, first: str | None = None) -> Play:
    """Two to five tasks, the first of type `first`, all others of any."""
    arch = draw(st.sampled_from([arch for arch in ARCHS if first != PARALLEL or arch in MLP]))
    kinds = [first, *[None] * draw(st.integers(1, 4))]
    members = tuple(draw(_members(arch, number, kind)) for number, kind in enumerate(kinds))
    return Play(
        arch,
        draw(st.sampled_from((torch.float32, torch.float64))),
        members,
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from((2048, 64, 1))),
    )


@st.composite
def _members(draw: st.DrawFn, arch: str, number: int, kind: str | None) -> Member:
    masks = draw(st.lists(_masks(), min_size=1, max_size=4))
    trial = PeftTrial(
        f"task-{number}",
        draw(_SPECS[kind or draw(st.sampled_from(TYPES if arch in MLP else TYPES[:-1]))](arch)),
        [len(mask) for mask in masks],
        batch=draw(st.integers(1, 4)),
        steps=draw(st.integers(1, 3)),
        learning_rate=draw(st.sampled_from((1e-3, 1e-2))),
        weight_decay=draw(st.sampled_from((0.0, 0.1))),
        max_grad_norm=draw(st.sampled_from((0.05, 1.0))),
        seed=draw(st.integers(1, 5)),
        chunk_tokens=draw(st.sampled_from((None, 16, 1))),
    )
    joins = draw(st.integers(0, 2))
    pauses = draw(st.none() | st.tuples(st.integers(joins + 1, ROUNDS), st.integers(1, 2)))
    leaves = draw(st.none() | st.tuples(st.integers(joins + 1, ROUNDS), st.sampled_from(("cancel", "detach"))))
    return Member(trial, tuple(masks), joins, (pauses[0], sum(pauses)) if pauses else None, leaves)


def _masks() -> st.SearchStrategy[tuple[bool, ...]]:
    """Of examples of one token (nothing predicts it), of two, and of more: with one trained token, some or none."""
    some = st.lists(st.booleans(), min_size=1, max_size=20)
    last = st.integers(0, 12).map(lambda before: [False] * before + [True])
    return (last | some | st.just([])).map(lambda rest: (False, *rest))


def _names(names: Sequence[str], everything: str) -> st.SearchStrategy[object]:
    some = st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True).map(tuple)
    return st.just(everything) | some


def _low_rank(**fixed: object) -> Callable[[str], st.SearchStrategy[PeftBase]]:
    def strategy(arch: str) -> st.SearchStrategy[PeftBase]:
        return st.builds(
            Lora,
            r=st.integers(1, 9),
            lora_alpha=st.sampled_from((1, 8, 16)),
            lora_dropout=st.sampled_from((0.0, 0.1, 0.5)),
            target_modules=_names(LINEARS[arch], "all-linear"),
            **{key: st.just(value) for key, value in fixed.items()},
        )

    return strategy


def _bottleneck(placement: str) -> Callable[[str], st.SearchStrategy[PeftBase]]:
    return lambda arch: st.builds(
        Bottleneck,
        placement=st.just(placement),
        bottleneck_size=st.integers(1, 9),
        non_linearity=st.sampled_from(("relu", "gelu", "swish", "tanh")),
        scaling=st.sampled_from((0.5, 1, 4)),
    )


def _ia3(arch: str) -> st.SearchStrategy[PeftBase]:
    chosen = st.builds(
        lambda names, inner: IA3(target_modules=tuple(names), feedforward_modules=tuple(names[:1] if inner else ())),
        st.lists(st.sampled_from(LINEARS[arch]), min_size=1, max_size=3, unique=True),
        st.booleans(),
    )
    return st.just(IA3()) | chosen


_SPECS: Mapping[str, Callable[[str], st.SearchStrategy[PeftBase]]] = {
    "lora": _low_rank(),
    "rslora": _low_rank(use_rslora=True),
    "dora": _low_rank(use_dora=True),
    "pissa": _low_rank(init_lora_weights="pissa"),
    "ia3": _ia3,
    "houlsby": _bottleneck("houlsby"),
    "pfeiffer": _bottleneck("pfeiffer"),
    "bitfit": lambda arch: st.builds(
        BitFit, target_modules=_names(LINEARS[arch], "all-linear"), norm_biases=st.booleans()
    ),
    "ln_tuning": lambda arch: st.builds(LnTuning, target_modules=_names(NORMS[arch], "all-norms")),
    "shira": lambda arch: st.builds(Shira, r=st.integers(1, 3), target_modules=_names(LINEARS[arch], "all-linear")),
    "prefix_tuning": lambda arch: st.builds(PrefixTuning, num_virtual_tokens=st.integers(1, 9)),
    "prompt_tuning": lambda arch: st.builds(PromptTuning, num_virtual_tokens=st.integers(1, 9)),
    PARALLEL: _bottleneck("parallel"),
}


def played(play: Play) -> dict[str, Outcome]:
    """All members on one engine, round by round; those who are gone, or have no step left, sit out."""
    outcomes: dict[str, Outcome] = {}
    tasks: dict[str, Task] = {}
    with exact(play.dtype):
        engine = Engine(play.backbone, recompute=play.recompute, fuse_tokens=play.fuse_tokens)
        for number in range(ROUNDS):
            for member in play.members:
                _come_or_go(engine, play, member, number, tasks)
            _round(engine, outcomes)
        for member in play.members:
            task = tasks[member.name]
            if member.name in engine.tasks:
                assert engine.task(task) is task
                continue
            assert not task.adapter.parameters.gradient.any(), "a detached task holds a gradient"
        for name, logprobs in _final_logprobs(engine, play.members).items():
            outcomes.setdefault(name, Outcome()).logprobs = logprobs
    for name, task in tasks.items():
        _keep(outcomes.setdefault(name, Outcome()), task)
    return outcomes


def alone(play: Play, member: Member, steps: int, *, stays: bool) -> Outcome:
    """The member on an engine of its own for so many steps."""
    outcomes = {member.name: Outcome()}
    with exact(play.dtype):
        engine = Engine(play.backbone, recompute=play.alone_recompute)
        task = _attach(engine, play, member)
        for _ in range(steps):
            _round(engine, outcomes)
        if stays:
            outcomes[member.name].logprobs = _final_logprobs(engine, [member])[member.name]
    _keep(outcomes[member.name], task)
    return outcomes[member.name]


def _come_or_go(engine: Engine, play: Play, member: Member, number: int, tasks: dict[str, Task]) -> None:
    """What the member does before this round."""
    name = member.name
    if number == member.joins:
        tasks[name] = _attach(engine, play, member)
    if name not in engine.tasks or engine.task(name).status.final:
        return
    if member.pauses and number == member.pauses[0]:
        engine.pause(name)
    if member.pauses and number == member.pauses[1]:
        engine.resume(name)
    if member.leaves and number == member.leaves[0]:
        (engine.cancel if member.leaves[1] == "cancel" else engine.detach)(name)


def _attach(engine: Engine, play: Play, member: Member) -> Task:
    task = engine.attach(member.trial.job, Sequences(member.examples), chunk_tokens=member.trial.chunk_tokens)
    task.adapter.load(_start(play.arch, play.dtype, member.trial.peft, member.trial.seed))
    return task


def _round(engine: Engine, outcomes: dict[str, Outcome]) -> None:
    """One optimizer step of whoever has one left; nobody, perhaps."""
    record = engine.execute(engine.schedule([task.participant() for task in engine.tasks.values() if task.runnable]))
    for action in record.actions:
        if action.step is not None:
            outcomes.setdefault(action.step.task, Outcome()).steps.append(action.step)


def _final_logprobs(engine: Engine, members: Sequence[Member]) -> dict[str, tuple[float, ...]]:
    """Of the members that are attached still, whatever their status: one forward pass of all."""
    found = engine.forward({member.name: member.examples for member in members if member.name in engine.tasks})
    return {name: outcome.logprobs or () for name, outcome in found.items()}


def _keep(outcome: Outcome, task: Task) -> None:
    outcome.values = task.adapter.parameters.values.clone()
    outcome.moments = dict(task.optimizer.moments())
