"""A backbone of which this rank holds a part: tensor parallelism after Megatron-LM (Shoeybi et al., 2019).

    x -> norm -> f -> [q k v] of the rank's heads -> attention -> o -> g -> + x
      -> norm -> f -> [gate up] of the rank's units -> down -> g -> + x

f hands rows on and sums their gradients over the ranks, g sums partial rows and hands their gradients on: one exchange
a sublayer each way. Everything outside f and g (residual rows, norms, the loss) is the same on every rank.

An attach point of a row-parallel linear has two sides. A module that is linear in the rank's inputs (LoRA) hooks the
partial product, so that g carries its share for nothing. One that needs the whole output (a bias, a scale, a network
after it) hooks `summed_name`, behind g.

A `CutPass` runs a sublayer between f and g alone, without either: `muxtune.parallel.subgraphs` exchanges instead.

The boundary: transformers' own modules, with their linears narrowed by `muxtune.parallel.slices`, as the general block
runs them. What hooks them is the business of `muxtune.parallel.adapters`.

Cost: 2 exchanges of [T, D] a layer and direction, one of [T, E] for the embedding, those of `vocabulary` for the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from muxtune.models import attention
from muxtune.models.attach import LinearOp, Pass, PassSlot
from muxtune.models.backbone import Backbone
from muxtune.models.layout import check_folder
from muxtune.parallel.mesh import TensorAxis, entered, summed
from muxtune.parallel.shard import Cut, LayerSizes, Part, split
from muxtune.parallel.slices import cuts_of, load_part, sizes_of, whole_of
from muxtune.parallel.vocabulary import VocabularyEmbedding, VocabularyHead


def load_sharded(
    folder: Path,
    axis: TensorAxis,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_hidden_layers: int | None = None,
) -> ShardedBackbone:
    """This rank's part of a model folder. Raises ModelError as loading does, ConfigError for too high a degree."""
    attention.register()
    layout = check_folder(folder)
    whole = whole_of(layout, num_hidden_layers)
    sizes = sizes_of(whole)
    part = split(sizes, axis.size)[axis.rank]
    cuts = cuts_of(whole, sizes, part)
    model = load_part(layout, whole, cuts, dtype=dtype, device=device, layers=num_hidden_layers)
    return ShardedBackbone(model, whole, axis, sizes, part, cuts)


def summed_name(name: str) -> str:
    """What the whole output of a row-parallel linear is called as an attach point."""
    return f"{name}:sum"


@dataclass(slots=True)
class CutPass(Pass):
    """A pass whose sublayers run one by one: what a row-parallel linear answers is the rank's own summand."""


class ShardedBackbone(Backbone):
    """A `Backbone` over a part of a model; its operators are as wide as the part.

    Attributes:
        whole: the whole model without memory: shapes and names of every attach point, as specs and files mean them.
        cuts: what of each operator is held here, where it is not all.
        part: what of every layer, and of the vocabulary.
        row_parallel: the linears that g follows, by name.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        whole: Backbone,
        axis: TensorAxis,
        sizes: LayerSizes,
        part: Part,
        cuts: Mapping[str, Cut],
    ) -> None:
        self.whole, self.axis, self.sizes, self.part, self.cuts = whole, axis, sizes, part, cuts
        self._place_embedding(model)
        super().__init__(model, "transformers")
        # what hooks the embedding hooks whole rows, behind the sum, by the ids of all entries
        self.embedding.entries = self.embedding.in_features = sizes.vocabulary
        head = self.head
        self.head: VocabularyHead = VocabularyHead(
            head.weight_VD, head.bias_V, head.softcap, head.name, part.entries, sizes.vocabulary, axis
        )
        self.row_parallel: dict[str, RowParallel] = {}
        self._exchange()

    def _place_embedding(self, model: PreTrainedModel) -> None:
        """Put the rank's part in the place of the embedding, before the model is taken up."""
        _split_embedding(model, self.part.entries, self.axis)

    def _exchange(self) -> None:
        """Put f before the column-parallel linears and g behind the row-parallel ones."""
        entries: dict[tuple[int | None, bool], _Entry] = {}
        for name, op in self.attach_points.items():
            cut = self.cuts.get(name)
            if cut is None:
                continue
            module = self.model.get_submodule(name)
            if cut.side == "in":
                module.__dict__["forward"] = self.row_parallel[name] = RowParallel(op, self.axis, self.slot)
            else:
                entry = entries.setdefault((op.layer, "mlp_in" in op.roles), _Entry(self.axis))
                entry.readers += 1
                module.__dict__["forward"] = _ColumnParallel(op, entry, self.slot)

    @property
    def vocabulary(self) -> int:
        """Of the whole model."""
        return self.sizes.vocabulary

    @property
    def attention_shape(self) -> tuple[int, int, int]:
        """Of the rank's part: query heads, key/value heads and the width of one."""
        groups = len(self.part.groups)
        return groups * self.sizes.group_heads, groups, self.sizes.head_width


def _split_embedding(model: PreTrainedModel, entries: range, axis: TensorAxis) -> None:
    old = model.get_input_embeddings()
    scale = getattr(old, "scalar_embed_scale", None)
    model.set_input_embeddings(VocabularyEmbedding(old.weight, entries, axis, old.padding_idx, scale))


class _Entry:
    """f before linears that read the same rows: they share one, and so one exchange on the way back.

    The rows are known by identity, and forgotten once each reader has come; other rows only cost an exchange more.
    """

    def __init__(self, axis: TensorAxis) -> None:
        self.readers = 0
        self._axis = axis
        self._came = 0
        self._rows: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._rows is None or self._rows[0] is not x:
            self._rows, self._came = (x, entered(x, self._axis)), 0
        _, own = self._rows
        self._came += 1
        if self._came == self.readers:
            self._rows = None
        return own


class _ColumnParallel:
    """Stands in for the forward of a linear whose outputs are split."""

    def __init__(self, op: LinearOp, entry: _Entry, slot: PassSlot) -> None:
        self._op = op
        self._entry = entry
        self._slot = slot

    def __call__(self, x: Tensor) -> Tensor:
        return self._op(x if isinstance(self._slot.current, CutPass) else self._entry(x))


class RowParallel:
    """Stands in for the forward of a linear whose inputs are split. The bias is of the sum, not of its parts."""

    def __init__(self, op: LinearOp, axis: TensorAxis, slot: PassSlot) -> None:
        self._op = op
        self._bias, op.bias = op.bias, None
        self._axis = axis
        self._slot = slot
        self._sum = SummedOutput(op)

    def __call__(self, x: Tensor) -> Tensor:
        y, current = self._op(x), self._slot.current
        if isinstance(current, CutPass):
            return y
        return self.behind(summed(y, self._axis), current)

    def follows(self, current: Pass) -> bool:
        """Whether anything is to be done with the sum."""
        return self._bias is not None or self._sum.name in current.hooks

    def behind(self, y: Tensor, current: Pass | None) -> Tensor:
        """[..., O], what the linear gives, from the sum: the bias, and what hooks the whole output."""
        if self._bias is not None:
            y = y + self._bias
        hook = current.hooks.get(self._sum.name) if current is not None else None
        if hook is None:
            return y
        y_TO: Tensor = hook(self._sum, y.reshape(-1, y.shape[-1]))
        return y_TO.view(y.shape)


class SummedOutput:
    """The whole output of a row-parallel linear as a BaseOp: the identity on it."""

    kind = "sum"

    def __init__(self, op: LinearOp) -> None:
        self.name = summed_name(op.name)
        self.roles, self.layer, self.biased = op.roles, op.layer, op.biased
        self.in_features = self.out_features = op.out_features

    def forward(self, x_TO: Tensor) -> Tensor:
        """The rows as they are."""
        return x_TO
