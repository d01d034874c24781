"""Tokens that the backbone has no embedding or no position for are refused by name, before a pass that others share.

Asked when sequences are attached, for all of them at once, and again of whatever a schedule names: a source may come
from anywhere. Costs two sweeps over the ids: some microseconds for one sequence, a tenth of one for each of many.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from muxtune.data.types import TokenSequence
from muxtune.errors import DataError
from muxtune.models.backbone import Backbone

Ids = npt.NDArray[np.int32] | Sequence[int]
_AT_ONCE = 4096  # sequences, whose ids are copied to be looked at together


def require_known(ids: Ids, backbone: Backbone, *, what: str, where: str, before: int = 0, lead: int = 0) -> None:
    """Raises DataError unless the backbone takes `ids` after `before` tokens and `lead` virtual ones.

    Args:
        what: names the sequence, as in "example 3".
        where: the task or source it belongs to.
    """
    vocabulary, longest = backbone.vocabulary, backbone.max_positions
    if len(ids) == 0 or int(np.min(ids)) < 0 or int(np.max(ids)) >= vocabulary:
        raise DataError(f"{what} is empty or holds token ids outside 0..{vocabulary - 1}", where=where)
    if longest is not None and lead + before + len(ids) > longest:
        virtual = f" after {lead} virtual ones" if lead else ""
        raise DataError(
            f"{what} has {before + len(ids)} tokens{virtual}, the base model takes {longest}",
            where=where,
            hint="set max_length" if not before else "ask for fewer new tokens",
        )


def require_all_known(sequences: Sequence[TokenSequence], backbone: Backbone, *, where: str, lead: int = 0) -> None:
    """Raises DataError for the first of them that `require_known` refuses, as "example INDEX"."""
    for start in range(0, len(sequences), _AT_ONCE):
        block = sequences[start : start + _AT_ONCE]
        if not _known(block, backbone, lead):
            for sequence in block:
                require_known(sequence.ids, backbone, what=f"example {sequence.index}", where=where, lead=lead)


def _known(sequences: Sequence[TokenSequence], backbone: Backbone, lead: int) -> bool:
    lengths, longest = [len(sequence) for sequence in sequences], backbone.max_positions
    if min(lengths) == 0 or (longest is not None and lead + max(lengths) > longest):
        return False
    ids = np.concatenate([sequence.ids for sequence in sequences])
    return int(ids.min()) >= 0 and int(ids.max()) < backbone.vocabulary
