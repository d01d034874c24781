"""Which tasks' modules at one attach point run as one batched product, and whether that pays on this machine.

A *run* is tasks whose rows lie one after another, as many for each, without dropout, and whose adapters have one layout
and lie at equal distances in one slab. Its modules are one module on all its rows (`LoraModule.run`); all others go one
by one, which is the twin. LoRA and rsLoRA can be grouped.

**The choice is free.** Grouped and one by one are the same bits (`muxtune.peft.pair_stack`), so it may depend on who is
there, and on a measurement, without a task ever noticing. `measured` makes sure: a shape whose results differ on this
machine is never grouped.

**The measurement.** For one shape of pair, four pairs as one and one by one, there and back, interleaved, at growing
numbers of rows until grouping no longer pays: the answer is the number of rows a task up to which it does. Made when a
shape first meets company, which takes some hundredths of a second, and kept in the process for (shape, dtype, threads).
Not on disk: measuring is cheaper than knowing when a stored figure is stale.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from muxtune.peft.base import AdapterModule, Dispatch
from muxtune.peft.dropout import RowKeys
from muxtune.peft.lora import LoraModule
from muxtune.peft.pair_stack import PairShape, PairStack

Rule = Callable[[PairShape, int], bool]  # the shape and a task's rows -> whether to group


def always(shape: PairShape, rows: int) -> bool:
    """Group whatever can be."""
    return True


def never(shape: PairShape, rows: int) -> bool:
    """One by one: the twin."""
    return False


def measured(shape: PairShape, rows: int) -> bool:
    """Group where it was seen to pay; never single rows, whose products are of a matrix and a vector: their bits may
    depend on how many there are."""
    return 2 <= rows <= rows_that_pay(shape, torch.get_num_threads())


@dataclass(frozen=True, slots=True)
class Run:
    """Rows [start, stop) for one module: a task's own, or that of several."""

    start: int
    stop: int
    module: AdapterModule
    keys: RowKeys | None


def runs(name: str, dispatches: Sequence[Dispatch], rule: Rule) -> list[Run]:
    """The dispatches of attach point `name`, in the order of their rows, with those joined that may be."""
    found: list[Run] = []
    waiting: list[Dispatch] = []
    for dispatch in dispatches:
        if waiting and not _joins(name, waiting, dispatch, rule):
            found.append(_run(name, waiting))
            waiting = []
        waiting.append(dispatch)
    if waiting:
        found.append(_run(name, waiting))
    return found


def _run(name: str, members: Sequence[Dispatch]) -> Run:
    first, last = members[0], members[-1]
    module = first.adapter.modules[name]
    if len(members) > 1:
        assert isinstance(module, LoraModule)
        module = module.run(len(members), _distance(first, members[1]))
    return Run(first.start, last.stop, module, first.keys)


def _joins(name: str, members: Sequence[Dispatch], new: Dispatch, rule: Rule) -> bool:
    """Whether a task can be the next of a run."""
    first, last = members[0], members[-1]
    module, rows = first.adapter.modules[name], first.stop - first.start
    if not isinstance(module, LoraModule) or not module.stacks_with(new.adapter.modules[name]):
        return False
    if new.start != last.stop or new.stop - new.start != rows or first.keys is not None or new.keys is not None:
        return False
    distance = _distance(last, new)
    if distance <= 0 or (len(members) > 1 and distance != _distance(first, members[1])):
        return False
    return len(members) > 1 or rule(module.shape, rows)


def _distance(one: Dispatch, next_one: Dispatch) -> int:
    """Elements from one adapter's buffers to the other's; 0 where they are not of one slab."""
    here, there = one.adapter.slot, next_one.adapter.slot
    if here is None or there is None or here.slab is not there.slab:
        return 0
    return (there.index - here.index) * here.distance


_PAIRS = 4
_ROUNDS = 5
_GROWING = (4, 16, 64)  # rows a task
_SAMPLED = (2, 3, 8, 17)  # rows a task on which bits are compared
_ENOUGH_S = 2e-3  # where the pairs take longer, the number of calls no longer matters


@cache
def rows_that_pay(shape: PairShape, threads: int) -> int:
    """Up to how many rows a task grouping is faster here; 0 where it never is, or where its results would differ."""
    pairs = _Pairs(shape)
    if not all(pairs.same_bits(rows) for rows in _SAMPLED):
        return 0
    pays = 0
    for rows in _GROWING:
        grouped_s, one_by_one_s = pairs.seconds(rows)
        if grouped_s >= one_by_one_s:
            break
        pays = rows
        if one_by_one_s > _ENOUGH_S:
            break
    return pays


class _Pairs:
    """Pairs as they would lie in a slab, and rows for them."""

    def __init__(self, shape: PairShape) -> None:
        generator = torch.Generator().manual_seed(0)

        def drawn(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator).to(shape.dtype)

        most = _PAIRS * max(*_GROWING, *_SAMPLED)
        self._half = shape.rank * max(shape.inputs, shape.outputs)
        self._half += -self._half % 16
        self._values = drawn(_PAIRS, 2 * self._half)
        self._x_tI, self._y_tO = drawn(most, shape.inputs), drawn(most, shape.outputs)
        self._shape = shape

    def same_bits(self, rows: int) -> bool:
        """Whether four as one and each alone give the same outputs and gradients."""
        found = []
        for grouped in (True, False):
            gradient = torch.zeros_like(self._values)
            found.append((*self._run(self._stacks(gradient, grouped=grouped), rows), gradient))
        return all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))

    def seconds(self, rows: int) -> tuple[float, float]:
        """The fastest of each: grouped, one by one."""
        gradient = torch.zeros_like(self._values)
        sides = [self._stacks(gradient, grouped=grouped) for grouped in (True, False)]
        taken: tuple[list[float], list[float]] = ([], [])
        for _ in range(_ROUNDS + 1):
            for stacks, seconds in zip(sides, taken, strict=True):
                start = time.perf_counter()
                self._run(stacks, rows)
                seconds.append(time.perf_counter() - start)
        return min(taken[0]), min(taken[1])

    def _run(self, stacks: Sequence[PairStack], rows: int) -> tuple[Tensor, Tensor]:
        """All steps of all pairs; what became of the output and of the input gradient."""
        x_tI, y_tO = self._x_tI[: _PAIRS * rows], self._y_tO[: _PAIRS * rows].clone()
        grad_x_tI, each = x_tI.clone(), len(x_tI) // len(stacks)
        parts = zip(stacks, x_tI.split(each), y_tO.split(each), grad_x_tI.split(each), strict=True)
        for stack, x, y, grad_x in parts:
            down = stack.down(x)
            stack.add_up(y, down)
            stack.add_back(grad_x, stack.pull(x, down, y))
        return y_tO, grad_x_tI

    def _stacks(self, gradient: Tensor, *, grouped: bool) -> tuple[PairStack, ...]:
        if grouped:
            return (PairStack.of(*self._leaves(0, gradient), 0.5, _PAIRS, 2 * self._half),)
        return tuple(PairStack.of(*self._leaves(index, gradient), 0.5) for index in range(_PAIRS))

    def _leaves(self, index: int, gradient: Tensor) -> tuple[Tensor, Tensor]:
        pair, grads = self._matrices(self._values[index]), self._matrices(gradient[index])
        for leaf, grad in zip(pair, grads, strict=True):
            leaf.grad = grad
        return pair

    def _matrices(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        rank, inputs, outputs = self._shape.rank, self._shape.inputs, self._shape.outputs
        a_RI, b_RO = buffer[: rank * inputs], buffer[self._half : self._half + rank * outputs]
        return a_RI.view(rank, inputs), b_RO.view(rank, outputs).T
