"""A stage of a pipeline as a backbone: contiguous layers, and what stands before or after them at the ends.

The module tree is the whole model's, so every name and layer number is; what another stage holds has no memory here.
The first stage holds the token embedding, the last one the final norm and the head; a weight that both ends share is
held by both. What is small and made from ids and positions alone - learned positions, rotary tables, masks - every
stage has: each makes the arguments of its own layers, and only rows travel. On a stage that is not the first the
embedding answers zeros, which nobody reads.

Layers are split once, by the work of a row: a layer's multiplications, and at the end those of the head on the share of
rows that are trained (`muxtune.plan.stages`).

The boundary: who sends rows where is `muxtune.engine.pipelined`'s business; operators of a stage that several ranks
hold together are `muxtune.parallel.tensor`'s.

Legend: T packed rows, E embedding width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from muxtune.models import attention
from muxtune.models.attach import Op
from muxtune.models.backbone import Backbone, BlockChoice
from muxtune.models.layout import check_folder
from muxtune.parallel.pipe import Mesh, PipeAxis
from muxtune.parallel.shard import split
from muxtune.parallel.slices import cuts_of, load_part, sizes_of, whole_of
from muxtune.parallel.tensor import ShardedBackbone
from muxtune.peft.base import BaseOp, EndBase
from muxtune.plan.stages import split_layers
from muxtune.spec.peft import Place

TRAINED_SHARE = 0.5  # of a pass's rows, where nothing is known of them: what the head's work is taken for


@dataclass(frozen=True, slots=True)
class Stage:
    """This rank's stage: `layers` of the model, and whether its ends are here."""

    axis: PipeAxis
    layers: range

    @property
    def first(self) -> bool:
        return self.axis.first

    @property
    def last(self) -> bool:
        return self.axis.last

    def holds(self, op: BaseOp) -> bool:
        """Whether the operator is here."""
        if op.layer is not None:
            return op.layer in self.layers
        return self.first if op.kind == "embedding" else self.last


class Staged:
    """What a backbone that is one stage says beside what every backbone does.

    Attributes:
        stage: which.
        stages: the layers of each, of all.
        mesh: where this rank stands among all.
        whole: the whole model without memory: shapes and names of every attach point, as specs and files mean them.
    """

    stage: Stage
    stages: tuple[range, ...]
    mesh: Mesh
    whole: Backbone


class StagedBackbone(Staged, Backbone):
    """A stage that one rank holds."""

    def __init__(
        self, model: PreTrainedModel, whole: Backbone, stages: tuple[range, ...], mesh: Mesh, block: BlockChoice
    ) -> None:
        self.stages, self.mesh, self.whole = stages, mesh, whole
        self.stage = stage = _stage_of(stages, mesh)
        self._device, self._dtype = _where(model, held_by(stage, whole))
        if not stage.first:
            _leave_out_embedding(model, self._dtype, self._device)
        super().__init__(model, block)

    @property
    def device(self) -> torch.device:
        """Of what is held here."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """Of what is held here."""
        return self._dtype


class ShardedStage(Staged, ShardedBackbone):
    """A stage that the ranks of a tensor-parallel group hold together."""

    whole: Backbone

    def __init__(self, model: PreTrainedModel, whole: Backbone, stages: tuple[range, ...], mesh: Mesh) -> None:
        self.stages, self.mesh = stages, mesh
        self.stage = stage = _stage_of(stages, mesh)
        self._device, self._dtype = _where(model, held_by(stage, whole))
        sizes = sizes_of(whole)
        part = split(sizes, mesh.tensor.size)[mesh.tensor.rank]
        super().__init__(model, whole, mesh.tensor, sizes, part, cuts_of(whole, sizes, part))

    def _place_embedding(self, model: PreTrainedModel) -> None:
        if self.stage.first:
            super()._place_embedding(model)
        else:
            _leave_out_embedding(model, self._dtype, self._device)

    @property
    def device(self) -> torch.device:
        """Of what is held here."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """Of what is held here."""
        return self._dtype


@dataclass(frozen=True, slots=True)
class StageView:
    """What a stage has of its backbone, or of the whole one's names and shapes, as a PEFT type sees it
    (`muxtune.peft.base.BackboneView`)."""

    backbone: Backbone
    stage: Stage

    @property
    def ops(self) -> dict[str, Op]:
        return {name: op for name, op in self.backbone.ops.items() if self.stage.holds(op)}

    @property
    def ends(self) -> dict[str, EndBase]:
        return {name: op for name, op in self.backbone.ends.items() if self.stage.holds(op)}

    @property
    def module_names(self) -> list[str]:
        return self.backbone.module_names

    @property
    def places(self) -> tuple[Place, ...]:
        here = {*self.ops, *self.ends}
        return tuple(place for place in self.backbone.places if place.name in here)

    @property
    def attention_shape(self) -> tuple[int, int, int]:
        return self.backbone.attention_shape


def load_stage(
    folder: Path,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_hidden_layers: int | None = None,
    trained_share: float = TRAINED_SHARE,
    block: BlockChoice = "auto",
) -> StagedBackbone | ShardedStage:
    """This rank's part of a model folder: its stage, and of that what its tensor-parallel place holds.

    `block` is for a stage that one rank holds. Raises ModelError as loading does, ConfigError for too high a degree.
    """
    attention.register()
    layout = check_folder(folder)
    tensor = mesh.tensor
    whole = whole_of(layout, num_hidden_layers, split=tensor.size > 1)
    stages = stages_of(whole, mesh.pipe.stages, trained_share)
    cuts = {}
    if tensor.size > 1:
        sizes = sizes_of(whole)
        cuts = cuts_of(whole, sizes, split(sizes, tensor.size)[tensor.rank])
    held = held_by(_stage_of(stages, mesh), whole)
    model = load_part(layout, whole, cuts, dtype=dtype, device=device, layers=num_hidden_layers, held=held)
    if tensor.size > 1:
        return ShardedStage(model, whole, stages, mesh)
    return StagedBackbone(model, whole, stages, mesh, block)


def stages_of(whole: Backbone, stages: int, trained_share: float = TRAINED_SHARE) -> tuple[range, ...]:
    """The layers of each stage. Raises ConfigError where there are fewer layers than stages."""
    layers = len(whole.blocks)
    work = sum(op.in_features * op.out_features for op in whole.attach_points.values()) / layers
    head = trained_share * whole.head.in_features * whole.head.out_features
    counts = split_layers(layers, stages, layer_s=work, exit_s=head)
    stops = list(accumulate(counts))
    return tuple(range(stop - count, stop) for count, stop in zip(counts, stops, strict=True))


def held_by(stage: Stage, whole: Backbone) -> Callable[[str], bool]:
    """Whether a parameter or buffer of the model, by its full name, is the stage's."""
    body = whole.recipe.body
    layers = f"{body}.{whole.recipe.layers}."
    at_end = [f"{body}.{name}." for name in (whole.recipe.norm, whole.recipe.project_out) if name]
    first, last = f"{whole.embedding.name}.", (*at_end, f"{whole.head.name}.")

    def held(name: str) -> bool:
        if name.startswith(layers):
            return int(name.removeprefix(layers).partition(".")[0]) in stage.layers
        if name.startswith(first):
            return stage.first
        return stage.last or not name.startswith(last)

    return held


class NoEmbedding(nn.Module):
    """Stands in for the embedding where it is not: rows of the right width, zeros. Its weight has no memory, unless the
    head shares it."""

    def __init__(self, weight_VE: nn.Parameter, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = weight_VE
        self._like = (dtype, device)

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., E]."""
        dtype, device = self._like
        return torch.zeros((), dtype=dtype, device=device).expand(*ids.shape, self.weight.shape[1])


def _stage_of(stages: tuple[range, ...], mesh: Mesh) -> Stage:
    return Stage(mesh.pipe, stages[mesh.pipe.stage])


def _where(model: PreTrainedModel, held: Callable[[str], bool]) -> tuple[torch.device, torch.dtype]:
    """The device and the precision of what is held."""
    some = next(parameter for name, parameter in model.named_parameters() if held(name) and not parameter.is_meta)
    return some.device, some.dtype


def _leave_out_embedding(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    model.set_input_embeddings(NoEmbedding(model.get_input_embeddings().weight, dtype, device))
