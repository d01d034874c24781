"""The floor: the measured time of exactly the matrix products a step cannot do without, and of the optimizer's bytes.

For every linear layer that carries an adapter: the forward product and the gradient of its input (not where the input
is the embeddings: nothing below the lowest adapter needs one), the adapter's two products forward and its four
backward; and for trained positions only, the head's product and its input gradient. Each runs over the model's own
weights in the order of a pass, so that they come from memory as they do in training, into buffers that exist. Rows are
the ones really needed: real tokens, all tasks together or task by task. Attention's products, elementwise work and
allocation are left out, so the floor cannot be reached; how far one is above it is the figure that matters.

The optimizer's part is bytes over measured bandwidth: AdamW reads weight, gradient and two moments and writes three.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.loads import Load

OPTIMIZER_ACCESSES = 7  # of one fp32 word a parameter: 4 reads, 3 writes


@dataclass(frozen=True, slots=True)
class Rows:
    """What one pass runs: token rows of each task in it, and its trained positions."""

    tokens: tuple[int, ...]
    trained: int


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of one step of all tasks."""

    gemm_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        return self.gemm_s + self.optimizer_s


@dataclass(frozen=True, slots=True)
class _Linear:
    weight_OI: Tensor
    a_RI: Tensor
    b_OR: Tensor
    input_gradient: bool


class GemmPass:
    """The products of forward and backward over a model's weights, ready to run at any rows."""

    def __init__(self, model: PreTrainedModel, *, r: int) -> None:
        head = model.get_output_embeddings()
        self._head_VD: Tensor = head.weight.detach()
        self._r = r
        assert model.config.model_type == "llama", "the names of the layers that read embeddings are Llama's"
        self._linears = [
            _with_adapter(module.weight.detach(), r, input_gradient=not _reads_embeddings(name))
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module is not head
        ]
        self._buffers: dict[tuple[int, int, str], Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where the products run."""
        return self._head_VD.device

    @property
    def adapter_parameters(self) -> int:
        """Trainable parameters of one task."""
        return sum(linear.a_RI.numel() + linear.b_OR.numel() for linear in self._linears)

    def run(self, rows: Rows) -> None:
        """Every product of one pass once."""
        total = sum(rows.tokens)
        for linear in self._linears:
            self._forward(linear, total, rows.tokens)
        hidden = self._head_VD.shape[1]
        x_PD = self._buffer(rows.trained, hidden, "in")
        logits_PV = self._buffer(rows.trained, self._head_VD.shape[0], "head")
        torch.mm(x_PD, self._head_VD.t(), out=logits_PV)
        torch.mm(logits_PV, self._head_VD, out=self._buffer(rows.trained, hidden, "dx"))
        for linear in reversed(self._linears):
            self._backward(linear, total, rows.tokens)

    def _forward(self, linear: _Linear, total: int, tokens: Sequence[int]) -> None:
        outputs, inputs = linear.weight_OI.shape
        x_TI, y_TO = self._buffer(total, inputs, "in"), self._buffer(total, outputs, "out")
        torch.mm(x_TI, linear.weight_OI.t(), out=y_TO)
        for x_tI, y_tO in zip(x_TI.split(tokens), y_TO.split(tokens), strict=True):
            h_tR = self._buffer(len(x_tI), self._r, "h")
            torch.mm(x_tI, linear.a_RI.t(), out=h_tR)
            y_tO.addmm_(h_tR, linear.b_OR.t())

    def _backward(self, linear: _Linear, total: int, tokens: Sequence[int]) -> None:
        outputs, inputs = linear.weight_OI.shape
        x_TI, g_TO = self._buffer(total, inputs, "in"), self._buffer(total, outputs, "out")
        dx_TI = self._buffer(total, inputs, "dx")
        if linear.input_gradient:
            torch.mm(g_TO, linear.weight_OI, out=dx_TI)
        parts = zip(x_TI.split(tokens), g_TO.split(tokens), dx_TI.split(tokens), strict=True)
        for x_tI, g_tO, dx_tI in parts:
            h_tR, dh_tR = self._buffer(len(x_tI), self._r, "h"), self._buffer(len(x_tI), self._r, "dh")
            torch.mm(g_tO.t(), h_tR, out=self._buffer(outputs, self._r, "db"))
            torch.mm(g_tO, linear.b_OR, out=dh_tR)
            torch.mm(dh_tR.t(), x_tI, out=self._buffer(self._r, inputs, "da"))
            if linear.input_gradient:
                dx_tI.addmm_(dh_tR, linear.a_RI)

    def _buffer(self, rows: int, columns: int, role: str) -> Tensor:
        key = (rows, columns, role)
        if key not in self._buffers:
            like = self._head_VD
            self._buffers[key] = torch.full((rows, columns), 1e-3, dtype=like.dtype, device=like.device)
        return self._buffers[key]


def floor_of(load: Load, step: int, model: PreTrainedModel, *, r: int, fused: bool, repeats: int = 5) -> Floor:
    """The floor of one step of the load: all tasks in one pass, or each in its own. Median of `repeats`."""
    passes = GemmPass(model, r=r)
    per_task = [_rows(load, task, step) for task in range(len(load.tasks))]
    if fused:
        tokens = tuple(count for rows in per_task for count in rows.tokens)
        per_task = [Rows(tokens, sum(rows.trained for rows in per_task))]

    def all_passes() -> None:
        for rows in per_task:
            passes.run(rows)

    words = passes.adapter_parameters * len(load.tasks) * OPTIMIZER_ACCESSES
    return Floor(_median_s(all_passes, repeats), words * 4 / bandwidth_bytes_per_s(passes.device))


def bandwidth_bytes_per_s(device: torch.device) -> float:
    """Bytes read plus bytes written per second by a copy too large for any cache."""
    source = torch.ones(64 * 1024 * 1024, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / _median_s(lambda: target.copy_(source), 5)


def _rows(load: Load, task: int, step: int) -> Rows:
    batch = load.tasks[task][step]
    return Rows((sum(map(len, batch)),), sum(sequence.trained_tokens for sequence in batch))


def _with_adapter(weight_OI: Tensor, r: int, *, input_gradient: bool) -> _Linear:
    outputs, inputs = weight_OI.shape
    a_RI, b_OR = weight_OI.new_full((r, inputs), 1e-3), weight_OI.new_full((outputs, r), 1e-3)
    return _Linear(weight_OI, a_RI, b_OR, input_gradient)


def _reads_embeddings(name: str) -> bool:
    """Llama's names: the first layer's q, k and v read what no adapter has touched."""
    return "layers.0.self_attn." in name and not name.endswith("o_proj")


def _median_s(work: Callable[[], object], repeats: int) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
