"""How many ranks hold one model, and what of it: `tp` ranks hold each layer together, `pp` stages follow each other.

The boundary: numbers, without torch; who starts the ranks and how they meet is the business of others.
"""

from __future__ import annotations

from dataclasses import dataclass

from muxtune.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankLayout:
    """`tp` x `pp` ranks; those of one stage have consecutive numbers."""

    tp: int = 1
    pp: int = 1

    @property
    def size(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"tp {self.tp} x pp {self.pp}"


def layout_of(tp: int, pp: int, started: int | None = None) -> RankLayout:
    """What a run asks for, where `started` ranks are there already (None: not yet).

    Where the run asks for nothing, all that have been started hold each layer together. Raises ConfigError where the
    numbers do not go together.
    """
    if started is not None and tp == pp == 1:
        tp = started
    layout = RankLayout(tp, pp)
    if started is not None and layout.size != started:
        raise ConfigError(
            f"{layout} are {layout.size} ranks, and {started} have been started",
            where="tp" if tp > 1 else "pp",
            hint="start as many, or leave tp and pp out: then all of them hold each layer together",
        )
    return layout
