"""LoRA (Hu et al., 2021): y += s * B A dropout(x), beside a frozen linear; s = alpha / r, or alpha / sqrt(r) (rsLoRA).

A [R, I] starts uniform in +-1/sqrt(I) (what peft's Kaiming-uniform with a = sqrt 5 comes to) and B [O, R] at zero, so
training starts from the backbone itself. Each matrix is drawn from a generator of its own, seeded by the job's seed
and the attach point's name: the same seed gives the same adapter whatever else runs. Arithmetic is in the adapter's
own precision (fp32 on a bf16 backbone), as in peft.

B is stored transposed, [R, O], so that every product reads and writes rows of full width: with [O, R] and R = 8 two of
the six run 2-10 times slower in MKL (from 16 columns on there is no difference).

Legend: t rows of one task, I input features, O output features, R rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

from muxtune.peft.base import Adapter, AdapterModule, BaseOp, Kept, PlainModule, Slot
from muxtune.peft.dropout import RowKeys, keep_mask
from muxtune.peft.pair_stack import GROUPED_RANK, PairShape, PairStack
from muxtune.peft.parameters import FlatParameters
from muxtune.peft.start import uniform


class LowRankModule(PlainModule):
    """A pair at one attach point, and its input with dropout: what LoRA and its kin share."""

    def __init__(self, attach_point: str, lora_a_RI: Tensor, lora_b_OR: Tensor, scale: float, dropout: float) -> None:
        super().__init__(lora_a_RI, lora_b_OR)
        self._attach_point = attach_point
        self._scale = scale
        self._dropout = dropout
        self._dtype = lora_a_RI.dtype

    def _delta(self, inputs_tI: Tensor) -> Tensor:
        """s B A x, through autograd, from what `_inputs` gives."""
        a_RI, b_OR, *_ = self.parameters
        return self._scale * (inputs_tI @ a_RI.T @ b_OR.T)

    def _inputs(self, x_tI: Tensor, keys: RowKeys | None) -> Tensor:
        """The rows in the adapter's precision, with dropout."""
        if x_tI.dtype != self._dtype:
            x_tI = x_tI.to(self._dtype)
        return self._drop(x_tI, keys)

    def _drops(self, keys: RowKeys | None) -> bool:
        return keys is not None and self._dropout > 0

    def _drop(self, x_tI: Tensor, keys: RowKeys | None) -> Tensor:
        if keys is None or self._dropout == 0:
            return x_tI
        keep_tI = keep_mask(keys, self._attach_point, x_tI.shape[1], self._dropout)
        return x_tI * keep_tI / (1 - self._dropout)


class LoraModule(LowRankModule):
    """y + s B A dropout(x), by hand and plainly."""

    by_hand = True

    def __init__(self, attach_point: str, lora_a_RI: Tensor, lora_b_OR: Tensor, scale: float, dropout: float) -> None:
        super().__init__(attach_point, lora_a_RI, lora_b_OR, scale, dropout)
        self.shape = PairShape(lora_a_RI.shape[0], lora_a_RI.shape[1], lora_b_OR.shape[0], self._dtype)
        self.bind()

    def bind(self) -> None:
        """Make anew the views that the products take, which cost as much as a small product."""
        a_RI, b_OR, *_ = self.parameters
        self._pair = PairStack.of(a_RI, b_OR, self._scale)
        self._runs: dict[tuple[int, int], LoraModule] = {}

    def run(self, count: int, distance: int) -> LoraModule:
        """This pair and those of the adapters behind its own as one module, on the rows of all; see `PairStack.of`."""
        found = self._runs.get((count, distance))
        if found is None:
            found = self._runs[count, distance] = copy(self)
            a_RI, b_OR, *_ = self.parameters
            found._pair = PairStack.of(a_RI, b_OR, self._scale, count, distance)
        return found

    def stacks_with(self, other: AdapterModule) -> bool:
        """Whether the two make one stack, given that their adapters have the same layout."""
        return (
            type(self) is type(other) is LoraModule
            and self._scale == other._scale
            and self.shape == other.shape
            and self.shape.rank >= GROUPED_RANK
        )

    def forward_rows(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Kept:
        """Add s B A x to the BaseOp's rows; keeps A x."""
        down_1tR = self._pair.down(self._inputs(x_tI, keys))
        self._pair.add_up(y_tO, down_1tR)
        return (down_1tR,)

    def backward_output(self, x_tI: Tensor, kept: Kept, grad_y_tO: Tensor, keys: RowKeys | None) -> Kept:
        """Dropout masks are made again, not kept."""
        (down_1tR,) = kept
        return (self._pair.pull(self._inputs(x_tI, keys), down_1tR, grad_y_tO.to(self._dtype)),)

    def backward_input(self, x_tI: Tensor, kept: Kept, grad_x_tI: Tensor, keys: RowKeys | None) -> None:
        (grad_down_1tR,) = kept
        if grad_x_tI.dtype == self._dtype and not self._drops(keys):
            self._pair.add_back(grad_x_tI, grad_down_1tR)
        else:
            grad_x_tI += self._drop(self._pair.back(grad_down_1tR), keys).to(grad_x_tI.dtype)

    def forward_plain(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        return (y_tO + self._delta(self._inputs(x_tI, keys))).to(y_tO.dtype)


class LowRankAdapter(Adapter):
    """A pair at each of its attach points, `lora_A` [R, I] and `lora_B` [O, R] among its parameters."""

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Attach point -> (A [R, I], B [O, R]), detached views of the live values."""
        views = self.parameters.views
        return {name: (views[f"{name}.lora_A"].detach(), views[f"{name}.lora_B"].detach()) for name in self.modules}


class LoraAdapter(LowRankAdapter):
    """A LoRA pair at each of `ops`; it may lie in a slab.

    Args:
        ops: the attach points to hook, in the backbone's order.
        scale: alpha / r, or alpha / sqrt(r).
        seed: the job's; decides the start values with the attach points' names alone.
        dtype: of the parameters, float32 or float64.
    """

    def __init__(
        self,
        ops: Iterable[BaseOp],
        *,
        r: int,
        scale: float,
        dropout: float,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        ops = list(ops)
        parameters = low_rank_parameters(ops, r, dtype, device)
        draw_start(ops, parameters, seed)
        modules = {op.name: LoraModule(op.name, *pair_of(op, parameters), scale, dropout) for op in ops}
        super().__init__(modules, parameters, stochastic=dropout > 0)
        self._own = modules

    movable = True

    def moved(self, slot: Slot) -> None:
        super().moved(slot)
        for module in self._own.values():
            module.bind()

    def load_pairs(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Take the values of `pairs`, which must cover exactly this adapter's attach points."""
        tensors = {f"{name}.lora_A": pair[0] for name, pair in pairs.items()}
        self.load(tensors | {f"{name}.lora_B": pair[1] for name, pair in pairs.items()})


def low_rank_parameters(
    ops: Sequence[BaseOp], r: int, dtype: torch.dtype, device: torch.device, *, magnitudes: bool = False
) -> FlatParameters:
    """`NAME.lora_A` [R, I] and `NAME.lora_B` [O, R] for each op, zero; `NAME.lora_magnitude_vector` [O] if asked."""
    shapes: dict[str, tuple[int, ...]] = {}
    for op in ops:
        shapes[f"{op.name}.lora_A"] = (r, op.in_features)
        shapes[f"{op.name}.lora_B"] = (op.out_features, r)
        if magnitudes:
            shapes[f"{op.name}.lora_magnitude_vector"] = (op.out_features,)
    turned = {name for name in shapes if name.endswith(".lora_B")}
    return FlatParameters(shapes, dtype, device, columns_first=turned)


def pair_of(op: BaseOp, parameters: FlatParameters) -> tuple[Tensor, Tensor]:
    """The leaves A [R, I] and B [O, R] of one attach point."""
    return parameters.views[f"{op.name}.lora_A"], parameters.views[f"{op.name}.lora_B"]


@torch.no_grad()
def draw_start(ops: Iterable[BaseOp], parameters: FlatParameters, seed: int) -> None:
    """Each A as it starts; B stays zero."""
    for op in ops:
        a_RI, _ = pair_of(op, parameters)
        a_RI.copy_(uniform(seed, f"{op.name}/lora_A", a_RI.shape))
