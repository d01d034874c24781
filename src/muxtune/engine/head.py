"""Adapters on the head: from dispatches of gathered rows to what the sweep over them takes.

The layers' adapters join through hooks of the pass; the head runs on gathered rows and in slices (`models.loss`), so
its own join there. The models know nothing of adapters and the PEFT layer nothing of slices: here they meet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from muxtune.models.head_rows import HeadRows
from muxtune.models.loss import Head
from muxtune.peft.base import Dispatch
from muxtune.peft.lora_ends import HeadModule, HeadShare


def hooked_rows(dispatches: Iterable[Dispatch], head: Head) -> list[HeadRows]:
    """`dispatches` say which of the gathered rows are whose, ascending; those that the head's name is nothing to are
    left out."""
    return [
        HeadRows(item.start, item.stop, HeadShare(cast("HeadModule", item.adapter.modules[head.name]), item.keys))
        for item in dispatches
        if head.name in item.adapter.modules and item.start < item.stop
    ]
