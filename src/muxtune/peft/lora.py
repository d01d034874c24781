"""LoRA (Hu et al., 2021): y += s * B A dropout(x), beside a frozen linear; s = alpha / r, or alpha / sqrt(r) (rsLoRA).

A [R, I] starts uniform in +-1/sqrt(I) (what peft's Kaiming-uniform with a = sqrt 5 comes to) and B [O, R] at zero, so
training starts from the backbone itself. Each matrix is drawn from a generator of its own, seeded by the job's seed
and the attach point's name: the same seed gives the same adapter whatever else runs. Arithmetic is in the adapter's
own precision (fp32 on a bf16 backbone), as in peft.

At the token embedding and the head it is `muxtune.peft.lora_ends`.

B is stored transposed, [R, O], so that every product reads and writes rows of full width: with [O, R] and R = 8 two of
the six run 2-10 times slower in MKL (from 16 columns on there is no difference).

Legend: t rows of one task, I input features, O output features, R rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from muxtune.peft.base import Adapter, AdapterModule, BaseOp, EmbeddingBase, Kept, PlainModule, Slot
from muxtune.peft.dropout import RowKeys, keep_mask
from muxtune.peft.lora_ends import LoraEmbeddingModule
from muxtune.peft.pair_stack import GROUPED_RANK, PairShape, PairStack
from muxtune.peft.parameters import FlatParameters
from muxtune.peft.start import normal, uniform

EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"


class LowRankModule(PlainModule):
    """A pair at one attach point, and its input with dropout: what LoRA and its kin share."""

    def __init__(self, attach_point: str, lora_a_RI: Tensor, lora_b_OR: Tensor, scale: float, dropout: float) -> None:
        super().__init__(lora_a_RI, lora_b_OR)
        self._attach_point = attach_point
        self._scale = scale
        self._dropout = dropout
        self._dtype = lora_a_RI.dtype
        self.first_channel = 0  # of the attach point's inputs, where its rows are a part of them

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
        keep_tI = keep_mask(keys, self._attach_point, x_tI.shape[1], self._dropout, self.first_channel)
        return x_tI * keep_tI / (1 - self._dropout)


class LoraModule(LowRankModule):
    """y + s B A dropout(x), by hand and plainly."""

    by_hand = True

    def __init__(self, attach_point: str, lora_a_RI: Tensor, lora_b_OR: Tensor, scale: float, dropout: float) -> None:
        super().__init__(attach_point, lora_a_RI, lora_b_OR, scale, dropout)
        self.shape = PairShape(lora_a_RI.shape[0], lora_a_RI.shape[1], lora_b_OR.shape[0], self._dtype)
        self.bind()

    def bind(self) -> None:
        """Have the views that the products take made anew, which cost as much as a small product, when they are
        needed."""
        self.__dict__.pop("_pair", None)
        self._runs: dict[tuple[int, int], LoraModule] = {}

    @cached_property
    def _pair(self) -> PairStack:
        a_RI, b_OR, *_ = self.parameters
        return PairStack.of(a_RI, b_OR, self._scale)

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
    """A pair at each of its attach points, `lora_A` [R, I] and `lora_B` [O, R] among its parameters; at the token
    embedding `lora_embedding_A` [R, V] and `lora_embedding_B` [E, R]."""

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Attach point -> (A [R, I], B [O, R]), detached views of the live values; the embedding is not among them."""
        return self._pairs("lora_A", "lora_B")

    def embedding_pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The embedding, where it is hooked -> (A [R, V], B [E, R])."""
        return self._pairs(EMBEDDING_A, EMBEDDING_B)

    def _pairs(self, first: str, second: str) -> dict[str, tuple[Tensor, Tensor]]:
        views = self.parameters.views
        return {
            name: (views[f"{name}.{first}"].detach(), views[f"{name}.{second}"].detach())
            for name in self.modules
            if f"{name}.{first}" in views
        }


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
        modules = {op.name: _module(op, pair_of(op, parameters), scale, dropout) for op in ops}
        super().__init__(modules, parameters, stochastic=dropout > 0)
        self._own = modules

    movable = True

    def moved(self, slot: Slot) -> None:
        super().moved(slot)
        for module in self._own.values():
            module.bind()

    def load_pairs(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Take the values of `pairs`, which must cover exactly this adapter's attach points, none the embedding."""
        tensors = {f"{name}.lora_A": pair[0] for name, pair in pairs.items()}
        self.load(tensors | {f"{name}.lora_B": pair[1] for name, pair in pairs.items()})


def low_rank_parameters(
    ops: Sequence[BaseOp], r: int, dtype: torch.dtype, device: torch.device, *, magnitudes: bool = False
) -> FlatParameters:
    """A [R, I] and B [O, R] for each op, zero, by `names_of`; `NAME.lora_magnitude_vector` [O] if asked."""
    shapes: dict[str, tuple[int, ...]] = {}
    turned = set()
    for op in ops:
        first, second = names_of(op)
        shapes[first], shapes[second] = (r, op.in_features), (op.out_features, r)
        turned |= {second} if op.kind != "embedding" else {first, second}
        if magnitudes:
            shapes[f"{op.name}.lora_magnitude_vector"] = (op.out_features,)
    return FlatParameters(shapes, dtype, device, columns_first=turned)


def pair_of(op: BaseOp, parameters: FlatParameters) -> tuple[Tensor, Tensor]:
    """The leaves A [R, I] and B [O, R] of one attach point."""
    first, second = names_of(op)
    return parameters.views[first], parameters.views[second]


def names_of(op: BaseOp) -> tuple[str, str]:
    """What A and B of an attach point are called."""
    if op.kind == "embedding":
        return f"{op.name}.{EMBEDDING_A}", f"{op.name}.{EMBEDDING_B}"
    return f"{op.name}.lora_A", f"{op.name}.lora_B"


def _module(op: BaseOp, pair: tuple[Tensor, Tensor], scale: float, dropout: float) -> LoraModule | LoraEmbeddingModule:
    if op.kind != "embedding":
        return LoraModule(op.name, *pair, scale, dropout)
    embedding = cast("EmbeddingBase", op)
    return LoraEmbeddingModule(*pair, scale * embedding.scale, embedding.padding_id)


@torch.no_grad()
def draw_start(ops: Iterable[BaseOp], parameters: FlatParameters, seed: int) -> None:
    """Each A as it starts; B stays zero. At the embedding it is the other way round."""
    for op in ops:
        a_RI, b_OR = pair_of(op, parameters)
        if op.kind == "embedding":
            b_OR.copy_(normal(seed, f"{op.name}/{EMBEDDING_B}", b_OR.shape))
        else:
            a_RI.copy_(uniform(seed, f"{op.name}/lora_A", a_RI.shape))
