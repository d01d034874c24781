"""Merging an adapter of any PEFT type into its base model.

The boundary: folders in, a folder out. The type says what it makes of the base's parameters (`registry.changes`), or
that it cannot be merged; `muxtune.models.merge` writes them. What the result is compared with is the adapter as it is
trained and sampled here: base + adapter on the backbone, in fp32.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from muxtune.engine.head import hooked_rows
from muxtune.engine.load import load_backbone
from muxtune.models import attention
from muxtune.models.attach import Pass
from muxtune.models.attention import AttentionContext, Segment
from muxtune.models.backbone import Backbone
from muxtune.models.merge import MergeReport, merge_into
from muxtune.models.merge_check import Prompt
from muxtune.models.skeleton import skeleton
from muxtune.models.sources import ModelFolder
from muxtune.peft import registry
from muxtune.peft.base import Dispatch
from muxtune.peft.folder import carried_files
from muxtune.peft.multiplex import hooks


def merge_adapter(folder: Path, base: ModelFolder, dest: Path) -> MergeReport:
    """Write `base` with the finished adapter in `folder` as the new model folder `dest`.

    Raises AdapterError where the folder is unsound, of other base weights, or of a type that cannot be merged;
    ModelError where `dest` exists.
    """
    attention.register()
    view = Backbone(skeleton(base.path))
    stored = registry.read_stored(folder, view, base_sha256=base.weights_sha256)
    changes = registry.changes(stored, view)
    adapted = partial(_adapted_logits, base, folder)
    return merge_into(base, changes, dest, adapted=adapted, extra_files=carried_files(folder))


@torch.no_grad()
def _adapted_logits(base: ModelFolder, folder: Path, prompt: Prompt) -> tuple[Tensor, Tensor]:
    """Of the base, and of base + adapter. The folder is read again, since what it says of the base's weights can only
    be judged beside them."""
    backbone = load_backbone(base, device="cpu", dtype="fp32")
    stored = registry.read_stored(folder, backbone, base_sha256=base.weights_sha256)
    adapter = registry.build_adapter(stored.spec, backbone, seed=0, dtype=backbone.dtype, device=backbone.device)
    registry.give(adapter, stored.values, where=str(folder))
    ids_T = prompt(backbone.vocabulary)
    rows = len(ids_T)
    found = []
    both: tuple[list[Dispatch], ...] = ([], [Dispatch(0, rows, adapter, None)])
    for dispatches in both:
        current = Pass(AttentionContext([Segment(rows)]), hooks(dispatches, joined=backbone.groups))
        hidden_TD = backbone.hidden(ids_T, torch.arange(rows), current)
        found.append(backbone.head.logits(hidden_TD, hooked_rows(dispatches, backbone.head)))
    return found[0], found[1]
