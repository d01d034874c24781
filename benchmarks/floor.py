"""The floor as a side of the race: exactly the matrix products a step cannot do without, and the optimizer's bytes.

For every linear layer that carries an adapter: the forward product and the gradient of its input (not where the input
is the embeddings: nothing below the lowest adapter needs one, and no weight is trained); of each task's own adapter
there, on its rows alone, two products forward and four backward - one less where the input needs no gradient; and for
trained positions only, the head's product and its input gradient, in the slices that the engine has. Each runs over the
model's own weights in the order of a pass, so that they come from memory as they do in training, into buffers that
exist, as it measured fastest: q, k and v as one product (gate and up as one are no faster), adapters of tasks that
bring equally many rows as one batched product.

Rows are the ones really needed, in the passes that a policy's schedule has (`passes_of`): of each sequence those up to
the last that predicts a trained token, filled up to a multiple of 16 a pass, as row invariance asks. Attention's
products, elementwise work and allocation are left out, so the floor cannot be reached; the share of it that a side
reaches is the figure that matters. Not counted as needless, though it could be left out: in the last layer, what
follows the keys and values of rows that predict nothing.

The optimizer's part is a copy of as many bytes as AdamW moves: it reads weight, gradient and two moments, writes three.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.loads import Load
from benchmarks.rows import schedules
from benchmarks.sides import EngineSide
from muxtune.data.types import TokenSequence
from muxtune.models.head_rows import SLICE_ROWS
from muxtune.plan.cost import ROW_MULTIPLE
from muxtune.plan.types import MicroBatch, RoundSchedule, WorkItem

OPTIMIZER_ACCESSES = 7  # of one fp32 word a parameter: 4 reads, 3 writes
_READS_EMBEDDINGS = "layers.0.self_attn.qkv"
_START = 1e-3


@dataclass(frozen=True, slots=True)
class Rows:
    """What one pass runs: token rows of each task in it, and its trained positions."""

    tokens: tuple[int, ...]
    trained: int

    @property
    def total(self) -> int:
        """Rows of the shared products."""
        return _filled(sum(self.tokens))


def passes_of(side: EngineSide, load: Load) -> list[tuple[Rows, ...]]:
    """For each step of a load, what its passes cannot do without. Nothing is run."""
    return [needed(schedule, side.engine.sources) for schedule in schedules(side, load)]


def needed(schedule: RoundSchedule, sources: Mapping[str, Sequence[TokenSequence]]) -> tuple[Rows, ...]:
    """Of each pass that trains; pieces of cut sequences count once."""
    batches = [action for action in schedule.actions if isinstance(action, MicroBatch) and action.trains]
    found = [[_needed(item, sources[item.source]) for item in batch.items] for batch in batches]
    return tuple(Rows(tuple(rows for rows, _ in items), sum(trained for _, trained in items)) for items in found)


def _needed(item: WorkItem, source: Sequence[TokenSequence]) -> tuple[int, int]:
    rows = trained = 0
    for ref in item.sequences:
        targets = np.flatnonzero(source[ref.index].mask)  # row i predicts token i + 1
        last = int(targets[-1]) if len(targets) else 0
        rows += max(0, min(ref.stop, last) - max(ref.start, ref.shared))
        trained += int(np.count_nonzero((targets >= max(ref.start + 1, ref.shared)) & (targets <= ref.stop)))
    return rows, trained


@dataclass(frozen=True, slots=True)
class _Pairs:
    """LoRA pairs of N tasks at one linear, whose outputs are `columns` of the product's, and their gradients."""

    columns: slice
    a_NRI: Tensor
    b_NRO: Tensor
    grad_a_NRI: Tensor
    grad_b_NRO: Tensor


@dataclass(frozen=True, slots=True)
class _Product:
    weight_OI: Tensor
    members: tuple[_Pairs, ...]
    input_gradient: bool


class GemmPass:
    """The products of forward and backward over a model's weights, ready to run at any rows of up to `tasks` tasks."""

    def __init__(self, model: PreTrainedModel, *, r: int, tasks: int = 1) -> None:
        head = model.get_output_embeddings()
        self._head_VD: Tensor = head.weight.detach()
        self._r = r
        self._tasks = tasks
        assert model.config.model_type == "llama", "the names of the layers are Llama's"
        linears = [
            (name, module.weight.detach())
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module is not head
        ]
        self._products = [
            _product([weight for _, weight in group], r, tasks, input_gradient=not name.endswith(_READS_EMBEDDINGS))
            for name, group in groupby(linears, key=lambda one: _joined_name(one[0]))
        ]
        self._buffers: dict[tuple[int, str], Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where the products run."""
        return self._head_VD.device

    @property
    def adapter_parameters(self) -> int:
        """Trainable parameters of one task."""
        pairs = [pairs for product in self._products for pairs in product.members]
        return sum(one.a_NRI[0].numel() + one.b_NRO[0].numel() for one in pairs)

    def run(self, rows: Rows, first: int = 0) -> None:
        """Every product of one pass once; its tasks' adapters are those from `first` on."""
        assert first + len(rows.tokens) <= self._tasks
        for product in self._products:
            self._forward(product, rows, first)
        self._head(rows.trained)
        for product in reversed(self._products):
            self._backward(product, rows, first)

    def _head(self, trained: int) -> None:
        vocabulary, hidden = self._head_VD.shape
        for start in range(0, trained, SLICE_ROWS):
            size = _filled(min(SLICE_ROWS, trained - start))
            x_nD, logits_nV = self._buffer(size, hidden, "in"), self._buffer(size, vocabulary, "head")
            torch.mm(x_nD, self._head_VD.t(), out=logits_nV)
            torch.mm(logits_nV, self._head_VD, out=self._buffer(size, hidden, "dx"))

    def _forward(self, product: _Product, rows: Rows, first: int) -> None:
        outputs, inputs = product.weight_OI.shape
        x_TI, y_TO = self._buffer(rows.total, inputs, "in"), self._buffer(rows.total, outputs, "out")
        torch.mm(x_TI, product.weight_OI.t(), out=y_TO)
        for pairs in product.members:
            for own, by_task in _runs(rows.tokens, first):
                x_KnI, y_KnO = by_task(x_TI), by_task(y_TO[:, pairs.columns])
                h_KnR = by_task(self._buffer(rows.total, self._r, "h"))
                torch.bmm(x_KnI, pairs.a_NRI[own].mT, out=h_KnR)
                y_KnO.baddbmm_(h_KnR, pairs.b_NRO[own])

    def _backward(self, product: _Product, rows: Rows, first: int) -> None:
        outputs, inputs = product.weight_OI.shape
        x_TI, g_TO = self._buffer(rows.total, inputs, "in"), self._buffer(rows.total, outputs, "out")
        dx_TI = self._buffer(rows.total, inputs, "dx")
        if product.input_gradient:
            torch.mm(g_TO, product.weight_OI, out=dx_TI)
        for pairs in product.members:
            for own, by_task in _runs(rows.tokens, first):
                x_KnI, g_KnO = by_task(x_TI), by_task(g_TO[:, pairs.columns])
                h_KnR, dh_KnR = (by_task(self._buffer(rows.total, self._r, role)) for role in ("h", "dh"))
                torch.bmm(h_KnR.mT, g_KnO, out=pairs.grad_b_NRO[own])
                torch.bmm(g_KnO, pairs.b_NRO[own].mT, out=dh_KnR)
                torch.bmm(dh_KnR.mT, x_KnI, out=pairs.grad_a_NRI[own])
                if product.input_gradient:
                    by_task(dx_TI).baddbmm_(dh_KnR, pairs.a_NRI[own])

    def _buffer(self, rows: int, columns: int, role: str) -> Tensor:
        """The first rows of the one buffer of this width and role, which grows to the most rows asked for."""
        held = self._buffers.get((columns, role))
        if held is None or len(held) < rows:
            like = self._head_VD
            held = torch.full((rows, columns), _START, dtype=like.dtype, device=like.device)
            self._buffers[columns, role] = held
        return held[:rows]


class FloorSide:
    """`step(s)` does what step s cannot do without: `passes[s]`, then the optimizers of `tasks` tasks."""

    def __init__(self, model: PreTrainedModel, passes: Sequence[tuple[Rows, ...]], *, r: int, tasks: int) -> None:
        self._passes, self._tasks = passes, tasks
        self._products = GemmPass(model, r=r, tasks=tasks)
        words = self._products.adapter_parameters * OPTIMIZER_ACCESSES // 2  # a copied word is read and written
        self._moved = torch.ones(words, device=self._products.device), torch.ones(words, device=self._products.device)
        every = [rows for step in passes for rows in step]
        largest = Rows((max(rows.total for rows in every),), max(rows.trained for rows in every))
        self._products.run(largest)  # all buffers exist before anything is measured

    def step(self, index: int) -> None:
        """The products, then each task's optimizer bytes."""
        first = 0
        for rows in self._passes[index]:
            if first + len(rows.tokens) > self._tasks:
                first = 0
            self._products.run(rows, first)
            first += len(rows.tokens)
        source, target = self._moved
        for _ in range(self._tasks):
            target.copy_(source)


def floor_side(side: EngineSide, load: Load, model: PreTrainedModel, *, r: int) -> FloorSide:
    """The floor of what `side` runs of a load, in its passes."""
    return FloorSide(model, passes_of(side, load), r=r, tasks=len(load.tasks))


def _product(weights: Sequence[Tensor], r: int, tasks: int, *, input_gradient: bool) -> _Product:
    members, start = [], 0
    for weight_OI in weights:
        outputs, inputs = weight_OI.shape
        a_NRI, b_NRO, grad_a_NRI, grad_b_NRO = (
            weight_OI.new_full((tasks, r, width), _START) for width in (inputs, outputs) * 2
        )
        members.append(_Pairs(slice(start, start + outputs), a_NRI, b_NRO, grad_a_NRI, grad_b_NRO))
        start += outputs
    joined_OI = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    return _Product(joined_OI, tuple(members), input_gradient)


def _runs(tokens: Sequence[int], first: int) -> Iterator[tuple[slice, partial[Tensor]]]:
    """Neighbours of equally many rows: which adapters they are, and what gives their rows of a matrix, task by task."""
    start, task = 0, first
    for size, group in groupby(tokens):
        count = len(list(group))
        if size:
            yield slice(task, task + count), partial(_by_task, slice(start, start + count * size), count)
        start, task = start + count * size, task + count


def _by_task(rows: slice, count: int, matrix_TX: Tensor) -> Tensor:
    return matrix_TX[rows].unflatten(0, (count, -1))


def _joined_name(name: str) -> str:
    """One for all of q, k and v of a layer."""
    parent, _, own = name.rpartition(".")
    return f"{parent}.qkv" if own in ("q_proj", "k_proj", "v_proj") else name


def _filled(rows: int) -> int:
    return rows + -rows % ROW_MULTIPLE
