"""Attention over packed rows: each *segment* of queries sees its own keys and values, and nothing else.

All sequences of a micro-batch lie one after another in one row dimension T; a segment says which rows form one
sequence. Packing, padding rows, a learned prefix and decoding from a cache are the same structure: a segment's keys are
those that its cache slot already holds, those of its spans, in order, and its own rows; causality and a sliding window
count over all of them as over one sequence. No block mask is ever built; each segment is one call of PyTorch's scaled
dot-product attention, so its result depends on its own rows and spans only.

The function is registered with transformers' attention interface under `ATTENTION_NAME`; transformers' modules call it
in place of their own once `attn_implementation` says so. The mask function beside it returns None: transformers must
build no mask of its own.

Cost: one kernel launch a segment, or a run of plain ones of equal length; each of a run has the bits it has alone; a causal sequence of n tokens costs n^2/2. Block-diagonal masks and padding measured
2.8x and 2.9x slower on ragged short sequences (docs/log.md).

Legend: T packed tokens, S tokens of one segment, N keys that it sees, P positions of a span, H query
heads, G key/value heads, K head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "muxtune_packed"


class Span(Protocol):
    """Keys and values that do not come from rows of the pass, such as a learned prefix; they may need a gradient."""

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """[1, G, P, K] each."""
        ...


class KeyValueStore(Protocol):
    """Keys and values of sequences whose rows come in several passes: for decoding `muxtune.models.kv_cache`, for
    training `muxtune.models.kv_carry`."""

    def extend(self, layer: int, slot: int, key_1GSK: Tensor, value_1GSK: Tensor) -> tuple[Tensor, Tensor]:
        """Keep S positions; all N positions that their queries may see, [1, G, N, K] each."""
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """`rows` consecutive query rows, and what they see before themselves: the keys and values of `spans`.

    With a `cache_slot` all of these join what the slot holds from earlier passes, spans included: a sequence brings
    its spans to its first pass only.
    """

    rows: int
    cache_slot: int | None = None
    spans: tuple[Span, ...] = ()


@dataclass(slots=True)
class AttentionContext:
    """What attention needs to know of one pass. `calls` counts per layer, for the support probe; `masks` are those of
    segments that need one, made once for all layers."""

    segments: Sequence[Segment]
    cache: KeyValueStore | None = None
    calls: dict[int, int] = field(default_factory=dict)
    masks: dict[tuple[int, int, int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runs = _runs(self.segments)
        self.sizes = [count * segment.rows for segment, count in self.runs]

    runs: list[tuple[Segment, int]] = field(init=False)  # segments, and how many like it lie there
    sizes: list[int] = field(init=False)  # rows of each run

    def visible(self, queries: int, keys: int, window: int | None, like: Tensor) -> Tensor:
        """bool [S, N]: which keys each query sees."""
        shape = (queries, keys, window, torch.bool)
        if shape not in self.masks:
            self.masks[shape] = _visible(queries, keys, window, like.device)
        return self.masks[shape]

    def bias(self, queries: int, keys: int, window: int | None, like: Tensor) -> Tensor:
        """The same to be added to scores, [S, N] of `like`'s precision: autograd would keep one of its own a layer."""
        shape = (queries, keys, window, like.dtype)
        if shape not in self.masks:
            hidden_SN = ~_visible(queries, keys, window, like.device)
            self.masks[shape] = like.new_zeros(queries, keys).masked_fill_(hidden_SN, float("-inf"))
        return self.masks[shape]


def packed_attention(
    module: nn.Module,
    query_1HTK: Tensor,
    key_1GTK: Tensor,
    value_1GTK: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature over packed rows; returns ([1, T, H, K], None).

    The backbone's own dropout stays off, so `dropout` is ignored; `attention_mask` is None by our mask function.
    """
    context = _context_of(module)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    context.calls[layer] = context.calls.get(layer, 0) + 1
    scale = scaling if scaling is not None else query_1HTK.shape[-1] ** -0.5
    outputs = []
    # split, not slicing: the backward of split is one concatenation, that of a slice a whole-size buffer of zeros
    for (segment, count), q, k, v in zip(
        context.runs,
        query_1HTK.split(context.sizes, dim=2),
        key_1GTK.split(context.sizes, dim=2),
        value_1GTK.split(context.sizes, dim=2),
        strict=True,
    ):
        if segment.spans:
            k, v = _after_spans(segment.spans, layer, k, v)
        if segment.cache_slot is not None:
            assert context.cache is not None
            k, v = context.cache.extend(layer, segment.cache_slot, k, v)
        if count > 1:
            q, k, v = (_apart(rows, count) for rows in (q, k, v))
        outputs.append(_attend(context, q, k, v, scale, sliding_window, softcap).transpose(1, 2).flatten(0, 1)[None])
    return torch.cat(outputs, dim=1), None


def _runs(segments: Sequence[Segment]) -> list[tuple[Segment, int]]:
    """Plain segments of equal length that lie side by side, as one and a number; all others by themselves. Those of one
    row too, whose products are of vectors: their bits might depend on how many there are."""
    runs: list[tuple[Segment, int]] = []
    for segment in segments:
        plain = segment.rows > 1 and segment.cache_slot is None and not segment.spans
        if plain and runs and runs[-1][0] == segment:
            runs[-1] = (segment, runs[-1][1] + 1)
        else:
            runs.append((segment, 1))
    return runs


def _apart(rows_1HTK: Tensor, count: int) -> Tensor:
    """[count, H, S, K]: so many segments side by side, as a batch; a view."""
    return rows_1HTK[0].unflatten(1, (count, -1)).transpose(0, 1)


def _after_spans(spans: Sequence[Span], layer: int, k_1GSK: Tensor, v_1GSK: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of the spans and then of the rows, in the rows' precision."""
    before = [span.keys_values(layer) for span in spans]
    return (
        torch.cat([*(k.to(k_1GSK.dtype) for k, _ in before), k_1GSK], dim=2),
        torch.cat([*(v.to(v_1GSK.dtype) for _, v in before), v_1GSK], dim=2),
    )


def _context_of(module: nn.Module) -> AttentionContext:
    """The context of the pass that the module's backbone is in (see `muxtune.models.attach`)."""
    current = module.__dict__["muxtune_slot"].current
    assert current is not None, "packed attention outside a pass"
    context: AttentionContext = current.attention
    return context


def _attend(
    context: AttentionContext,
    q_1HSK: Tensor,
    k_1GNK: Tensor,
    v_1GNK: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention of the last S of N positions; a query sees at most `window` keys, its own included."""
    queries, keys = q_1HSK.shape[2], k_1GNK.shape[2]
    grouped = q_1HSK.shape[1] != k_1GNK.shape[1]
    windowed = window is not None and keys > window
    if softcap is None and not windowed and (queries == keys or queries == 1):
        return F.scaled_dot_product_attention(
            q_1HSK, k_1GNK, v_1GNK, is_causal=queries > 1, scale=scale, enable_gqa=grouped
        )
    seen = window if windowed else None
    if softcap is None:
        bias_SN = context.bias(queries, keys, seen, q_1HSK)
        return F.scaled_dot_product_attention(
            q_1HSK, k_1GNK, v_1GNK, attn_mask=bias_SN, scale=scale, enable_gqa=grouped
        )
    visible_SN = context.visible(queries, keys, seen, q_1HSK)
    return _softcapped(q_1HSK, k_1GNK, v_1GNK, visible_SN, scale, softcap)


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool [S, N]: which keys each query sees."""
    query_S1 = torch.arange(keys - queries, keys, device=device)[:, None]
    key_1N = torch.arange(keys, device=device)[None, :]
    visible = key_1N <= query_S1
    return visible if window is None else visible & (key_1N > query_S1 - window)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, visible_SN: Tensor, scale: float, softcap: float) -> Tensor:
    """Gemma-2's capped scores, which no fused kernel of this version offers."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores_1HSN = torch.tanh(q @ k.transpose(-1, -2) * (scale / softcap)) * softcap
    # softmax in at least fp32, as transformers does, but never below the inputs' own precision
    accumulate = torch.promote_types(q.dtype, torch.float32)
    weights = scores_1HSN.masked_fill(~visible_SN, float("-inf")).softmax(-1, dtype=accumulate)
    return weights.to(v.dtype) @ v


def register() -> None:
    """Make the function known to transformers; safe to call again."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None
