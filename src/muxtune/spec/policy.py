"""The names of the policies by which tasks share passes; `muxtune.plan.planner` says what each does."""

from __future__ import annotations

from typing import Literal, get_args

Policy = Literal["sequential", "fuse-all", "padded", "muxtune"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
