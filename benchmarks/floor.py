"""The floor as a side of the race: exactly the matrix products a step cannot do without, and the optimizer's bytes.

For every linear layer that carries an adapter: the forward product and the gradient of its input (not where the input
is the embeddings: nothing below the lowest adapter needs one), the adapter's two products forward and its four
backward; and for trained positions only, the head's product and its input gradient. Each runs over the model's own
weights in the order of a pass, so that they come from memory as they do in training, into buffers that exist, in the
storage order that measured fastest. Rows are the ones really needed: real tokens, all tasks together or task by task.
Attention's products, elementwise work and allocation are left out, so the floor cannot be reached; the share of it
that a side reaches is the figure that matters.

The optimizer's part is a copy of as many bytes as AdamW moves: it reads weight, gradient and two moments, writes three.
"""

from __future__ import annotations

from collections.abc import Sequence
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
class _Linear:
    weight_OI: Tensor
    a_RI: Tensor
    b_RO: Tensor
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
        self._buffers: dict[tuple[int, str], Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where the products run."""
        return self._head_VD.device

    @property
    def adapter_parameters(self) -> int:
        """Trainable parameters of one task."""
        return sum(linear.a_RI.numel() + linear.b_RO.numel() for linear in self._linears)

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
            y_tO.addmm_(h_tR, linear.b_RO)

    def _backward(self, linear: _Linear, total: int, tokens: Sequence[int]) -> None:
        outputs, inputs = linear.weight_OI.shape
        x_TI, g_TO = self._buffer(total, inputs, "in"), self._buffer(total, outputs, "out")
        dx_TI = self._buffer(total, inputs, "dx")
        if linear.input_gradient:
            torch.mm(g_TO, linear.weight_OI, out=dx_TI)
        parts = zip(x_TI.split(tokens), g_TO.split(tokens), dx_TI.split(tokens), strict=True)
        for x_tI, g_tO, dx_tI in parts:
            h_tR, dh_tR = self._buffer(len(x_tI), self._r, "h"), self._buffer(len(x_tI), self._r, "dh")
            torch.mm(h_tR.t(), g_tO, out=self._buffer(self._r, outputs, "db"))
            torch.mm(g_tO, linear.b_RO.t(), out=dh_tR)
            torch.mm(dh_tR.t(), x_tI, out=self._buffer(self._r, inputs, "da"))
            if linear.input_gradient:
                dx_tI.addmm_(dh_tR, linear.a_RI)

    def _buffer(self, rows: int, columns: int, role: str) -> Tensor:
        """The first rows of the one buffer of this width and role, which grows to the most rows asked for."""
        held = self._buffers.get((columns, role))
        if held is None or len(held) < rows:
            like = self._head_VD
            held = torch.full((rows, columns), 1e-3, dtype=like.dtype, device=like.device)
            self._buffers[columns, role] = held
        return held[:rows]


class FloorSide:
    """`step(s)` does what step s of the load cannot do without: all tasks in one pass, or each in its own."""

    def __init__(self, load: Load, model: PreTrainedModel, *, r: int, fused: bool) -> None:
        self._load = load
        self._fused = fused
        self._passes = GemmPass(model, r=r)
        words = self._passes.adapter_parameters * OPTIMIZER_ACCESSES // 2  # a copied word is read and written
        self._moved = torch.ones(words, device=self._passes.device), torch.ones(words, device=self._passes.device)
        every = [rows for step in range(load.steps) for rows in self.rows(step)]
        largest = Rows((max(sum(rows.tokens) for rows in every),), max(rows.trained for rows in every))
        self._passes.run(largest)  # all buffers exist before anything is measured

    def step(self, index: int) -> None:
        """The products, then each task's optimizer bytes."""
        for rows in self.rows(index):
            self._passes.run(rows)
        source, target = self._moved
        for _ in self._load.tasks:
            target.copy_(source)

    def rows(self, index: int) -> tuple[Rows, ...]:
        """The passes of a step."""
        batches = [task[index] for task in self._load.tasks]
        alone = [
            Rows((sum(one.input_tokens for one in batch),), sum(one.trained_tokens for one in batch))
            for batch in batches
        ]
        if not self._fused:
            return tuple(alone)
        return (Rows(tuple(rows.tokens[0] for rows in alone), sum(rows.trained for rows in alone)),)


def _with_adapter(weight_OI: Tensor, r: int, *, input_gradient: bool) -> _Linear:
    outputs, inputs = weight_OI.shape
    a_RI, b_RO = weight_OI.new_full((r, inputs), 1e-3), weight_OI.new_full((r, outputs), 1e-3)
    return _Linear(weight_OI, a_RI, b_RO, input_gradient)


def _reads_embeddings(name: str) -> bool:
    """Llama's names: the first layer's q, k and v read what no adapter has touched."""
    return "layers.0.self_attn." in name and not name.endswith("o_proj")
