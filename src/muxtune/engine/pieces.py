"""What of a step is not a layer, timed: the head, a pass without layers, the optimizer; and linears of one rank of
several.

Each is the code that a step runs, on rows that mean nothing. The backbone's own weights are read; shards of them are
copies, of one layer at a time.

Legend: T packed rows, N trained rows, D model, I input features, O output features.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from muxtune.data.types import TokenSequence
from muxtune.engine.executor import Executor
from muxtune.engine.interleaved import Parts, Stopwatch
from muxtune.engine.optim import FlatAdamW
from muxtune.engine.references import References
from muxtune.models.attach import LinearOp
from muxtune.models.backbone import Backbone
from muxtune.models.loss import token_losses
from muxtune.peft.base import Adapter
from muxtune.peft.parameters import FlatParameters
from muxtune.plan.types import MicroBatch, RoundSchedule, SequenceRef, WorkItem

_BY_OUTPUT = frozenset(
    {"q", "k", "v", "mlp_in"}
)  # a rank has a part of the outputs; of the others a part of the inputs
_BY_INPUT = frozenset({"o", "mlp_out"})


class HeadTrial:
    """The head and the losses of N gathered rows: seconds without, and with their gradient."""

    def __init__(self, backbone: Backbone, rows: int, watch: Stopwatch) -> None:
        head, device = backbone.head, backbone.device
        self._head, self._watch = head, watch
        drawn = torch.randn(rows, head.in_features, generator=torch.Generator().manual_seed(0))
        self._hidden_ND = drawn.to(head.weight_VD)
        self._target_N = torch.arange(rows, device=device) % head.out_features
        precise = torch.promote_types(backbone.dtype, torch.float32)
        self._weight_N = torch.full((rows,), 1 / rows, dtype=precise, device=device)

    @torch.no_grad()
    def __call__(self) -> Parts:
        began = self._watch.now()
        token_losses(self._head, self._hidden_ND, self._target_N, None)
        between = self._watch.now()
        token_losses(self._head, self._hidden_ND, self._target_N, self._weight_N)
        return between - began, self._watch.now() - between


class EntryTrial:
    """A pass of the executor over T rows, no layer and no trained row."""

    def __init__(self, backbone: Backbone, lengths: Sequence[int], watch: Stopwatch) -> None:
        self._watch = watch
        empty = copy.copy(backbone)
        empty.blocks = []
        sequences = [_sequence(index, length) for index, length in enumerate(lengths)]
        self._executor = Executor(empty, {}, {"rows": sequences}, References())
        refs = tuple(SequenceRef(index, length) for index, length in enumerate(lengths))
        self._schedule = RoundSchedule(0, (MicroBatch(0, 0, (WorkItem(None, "reference", "rows", refs),)),))

    def __call__(self) -> Parts:
        began = self._watch.now()
        self._executor.execute(self._schedule)
        return (self._watch.now() - began,)


class OptimizerTrial:
    """One step of so many parameters, with the gradient's norm and clipping."""

    def __init__(self, backbone: Backbone, parameters: int, watch: Stopwatch) -> None:
        self._watch = watch
        precise = torch.promote_types(backbone.dtype, torch.float32)
        self._parameters = FlatParameters({"own": (parameters,)}, precise, backbone.device)
        self._optimizer = FlatAdamW(self._parameters, weight_decay=0.0, max_grad_norm=1.0)

    def __call__(self) -> Parts:
        self._parameters.gradient.fill_(1.0)
        began = self._watch.now()
        self._optimizer.step(1e-4, self._optimizer.gradient_norm())
        self._parameters.zero_gradient()
        return (self._watch.now() - began,)


class RefreshTrial:
    """What an adapter makes anew after each step."""

    def __init__(self, adapter: Adapter, watch: Stopwatch) -> None:
        self._adapter, self._watch = adapter, watch

    def __call__(self) -> Parts:
        began = self._watch.now()
        self._adapter.refresh()
        return (self._watch.now() - began,)


class ShardedTrial:
    """The linears of a layer at the shapes of one of `degree` ranks: seconds forward and to their inputs' gradient."""

    def __init__(self, ops: Sequence[LinearOp], degree: int, rows: int, watch: Stopwatch) -> None:
        self._watch = watch
        self._weights = [_shard(op, degree) for op in ops]
        self._x = [weight_OI.new_ones(rows, weight_OI.shape[1]) for weight_OI in self._weights]
        self._grad = [weight_OI.new_ones(rows, weight_OI.shape[0]) for weight_OI in self._weights]

    @torch.no_grad()
    def __call__(self) -> Parts:
        began = self._watch.now()
        for weight_OI, x_TI in zip(self._weights, self._x, strict=True):
            F.linear(x_TI, weight_OI)
        between = self._watch.now()
        for weight_OI, grad_TO in zip(reversed(self._weights), reversed(self._grad), strict=True):
            torch.mm(grad_TO, weight_OI)
        return between - began, self._watch.now() - between


def shardable(ops: Sequence[LinearOp], degree: int) -> bool:
    """Whether every linear of a layer is known to be split, and divides."""
    by_output = [op for op in ops if op.roles & _BY_OUTPUT]
    by_input = [op for op in ops if op.roles & _BY_INPUT]
    split = all(op.out_features % degree == 0 for op in by_output) and all(
        op.in_features % degree == 0 for op in by_input
    )
    return bool(ops) and split and len(by_output) + len(by_input) == len(ops)


def _shard(op: LinearOp, degree: int) -> Tensor:
    if degree == 1:
        return op.weight_OI
    if op.roles & _BY_INPUT:
        return op.weight_OI[:, : op.in_features // degree].clone(memory_format=torch.contiguous_format)
    return op.weight_OI[: op.out_features // degree].clone(memory_format=torch.contiguous_format)


def _sequence(index: int, length: int) -> TokenSequence:
    return TokenSequence(index, np.zeros(length, np.int32), np.zeros(length, np.bool_))
