"""Timelines as SVG: lanes from top to bottom, time from left to right, one block for whatever ran.

Blocks of one chart share a scale; several charts of a page may share it too, so that a predicted and a measured
timeline can be laid one under the other. Idle time of a lane that says so is drawn, since it is what plans are about.

The boundary: values in, markup out, everything escaped; no script, no file from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

Kind = Literal["forward", "backward", "pass", "carry", "eval", "step", "collective", "send"]

WIDTH = 1120
_LABELS = 190  # px left of the lanes
_LANE = 24
_GAP = 4
_AXIS = 26
_CHARACTER = 6.2  # px of a label's character, about
_TICKS = 8
_LEAST: Mapping[Kind, float] = {"step": 1.5, "collective": 1.5, "send": 1.5}  # px: seen, if not to scale
# Okabe and Ito's palette: told apart by people who see colours differently
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a8a00", "#7a5195")
IDLE = "#e6d9d4"  # as rect.idle of the page


@dataclass(frozen=True, slots=True)
class Block:
    """What ran in a lane. `group` chooses its colour (an hTask), `label` stands in it where there is room, `told` is
    what a pointer on it shows."""

    lane: int
    start_s: float
    end_s: float
    kind: Kind
    group: int
    label: str
    told: str


@dataclass(frozen=True, slots=True)
class Chart:
    """`idle`: the lanes whose idle time is drawn. `wall_s`: where the lanes end."""

    title: str
    lanes: tuple[str, ...]
    blocks: tuple[Block, ...]
    wall_s: float
    idle: frozenset[int] = frozenset()


def svg(chart: Chart, *, scale_s: float | None = None) -> Markup:
    """The chart; `scale_s` is the time that its whole width stands for, the chart's own by default."""
    span_s = max(scale_s or chart.wall_s, 1e-9)
    height = _AXIS + len(chart.lanes) * (_LANE + _GAP)
    parts = [
        Markup('<svg viewBox="0 0 {} {}" width="100%" role="img" aria-label="{}">').format(WIDTH, height, chart.title),
        *_axis(span_s, height),
        *_lanes(chart, span_s),
        *(_drawn(block, span_s) for block in chart.blocks),
        Markup("</svg>"),
    ]
    return Markup("\n").join(parts)


def _x(seconds: float, span_s: float) -> float:
    return _LABELS + (WIDTH - _LABELS - 8) * seconds / span_s


def _y(lane: int) -> float:
    return _AXIS + lane * (_LANE + _GAP)


def _axis(span_s: float, height: float) -> Iterator[Markup]:
    step = nice_step(span_s / _TICKS)
    for number in range(math.floor(span_s / step + 1e-9) + 1):
        x = _x(number * step, span_s)
        yield Markup('<line class="tick" x1="{0:.1f}" x2="{0:.1f}" y1="16" y2="{1}"/>').format(x, height)
        yield Markup('<text class="time" x="{:.1f}" y="12">{}</text>').format(x, seconds_text(number * step, step))


def nice_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, not below `least`."""
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def seconds_text(seconds: float, step: float = 0.0) -> str:
    """In seconds or milliseconds, as fine as `step` or the value itself asks for."""
    finest = step or abs(seconds) or 1.0
    if finest >= 1:
        return f"{seconds:.1f} s" if not step else f"{seconds:.0f} s"
    if finest >= 0.1:
        return f"{seconds:.1f} s" if step else f"{seconds:.2f} s"
    milliseconds = 1000 * seconds
    return f"{milliseconds:.0f} ms" if 1000 * finest >= 1 else f"{milliseconds:.2f} ms"


def _lanes(chart: Chart, span_s: float) -> Iterator[Markup]:
    for lane, name in enumerate(chart.lanes):
        y, width = _y(lane), _x(chart.wall_s, span_s) - _LABELS
        kind = "idle" if lane in chart.idle else "lane"
        yield Markup('<text class="name" x="{}" y="{:.1f}">{}</text>').format(
            _LABELS - 8, y + _LANE * 0.68, _clipped(name, _LABELS - 12)
        )
        yield Markup('<rect class="{}" x="{}" y="{:.1f}" width="{:.1f}" height="{}"/>').format(
            kind, _LABELS, y, width, _LANE
        )


def _drawn(block: Block, span_s: float) -> Markup:
    x, y = _x(block.start_s, span_s), _y(block.lane)
    width = max(_x(block.end_s, span_s) - x, _LEAST.get(block.kind, 0.6))
    fill = PALETTE[block.group % len(PALETTE)]
    label = block.label if len(block.label) * _CHARACTER + 6 <= width else ""
    text = Markup('<text class="in" x="{:.1f}" y="{:.1f}">{}</text>').format(x + width / 2, y + _LANE * 0.68, label)
    return Markup(
        '<g><title>{}</title><rect class="b {}" x="{:.2f}" y="{:.1f}" width="{:.2f}" height="{}" fill="{}"/>{}</g>'
    ).format(block.told, block.kind, x, y, width, _LANE, fill, text if label else "")


def _clipped(name: str, width: float) -> str:
    most = int(width / _CHARACTER)
    if len(name) <= most:
        return name
    tail = (most - 1) // 2  # generated names often differ at their end
    return f"{name[: most - 1 - tail]}\u2026{name[len(name) - tail :]}"


def groups(chart: Chart) -> list[int]:
    """The hTasks whose colours are seen, in order."""
    return sorted({block.group for block in chart.blocks if block.kind in ("forward", "backward", "pass", "carry")})


def legend(kinds: Sequence[tuple[Kind, str]], hues: Sequence[int] = (), *, idle: bool = False) -> Markup:
    """What the dress of blocks means, in their order; and the colours of hTasks, which come again after the last."""
    parts = [
        Markup(
            '<span class="key"><svg viewBox="0 0 26 14" width="26" height="14">'
            '<rect class="b {}" x="1" y="1" width="24" height="12" fill="{}"/></svg>{}</span>'
        ).format(kind, PALETTE[0], told)
        for kind, told in kinds
    ]
    if idle:
        parts.append(_hue(IDLE, "idle"))
    if len(hues) > 1:
        parts.append(Markup("<br>"))
        parts += (_hue(PALETTE[place % len(PALETTE)], f"hTask {place}") for place in hues[: len(PALETTE)])
    if len(hues) > len(PALETTE):
        parts.append(Markup('<span class="key">and the same {} colours again for the next</span>').format(len(PALETTE)))
    return Markup("").join(parts)


def _hue(colour: str, told: str) -> Markup:
    return Markup(
        '<span class="key"><svg viewBox="0 0 14 14" width="14" height="14">'
        '<rect x="1" y="1" width="12" height="12" fill="{}"/></svg>{}</span>'
    ).format(colour, told)
