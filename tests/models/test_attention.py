"""Packed attention against the textbook: explicit scores and masks, one sequence at a time, with gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muxtune.models.attach import Pass, PassSlot
from muxtune.models.attention import AttentionContext, Segment, packed_attention
from muxtune.models.kv_cache import KVCache

LENGTHS = (5, 1, 12, 3)
K = 8


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    groups: int = 2
    window: int | None = None
    softcap: float | None = None
    scaling: float | None = None
    options: dict[str, Any] = field(default_factory=dict)


SHAPES = {
    "plain": Shape(groups=4),
    "grouped": Shape(),
    "one key head": Shape(groups=1),
    "window": Shape(window=4),
    "window of one": Shape(window=1),
    "window wider than any": Shape(window=100),
    "softcap": Shape(softcap=1.5),
    "softcap and window": Shape(softcap=1.5, window=4, scaling=0.4),
    "own scale": Shape(scaling=0.17),
}


def _module(context: AttentionContext, layer: int = 0) -> nn.Module:
    """What transformers hands over: an attention module that knows its layer, told where its pass is."""
    module, slot = nn.Module(), PassSlot()
    slot.current = Pass(context)
    module.layer_idx = layer
    module.__dict__["muxtune_slot"] = slot
    return module


def _rows(heads: int, tokens: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[1, heads, tokens, K] as models make them: a transposed view."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, tokens, heads, K, generator=generator, dtype=dtype).transpose(1, 2)


def _textbook(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    """[heads, S, K] queries on [groups, N, K] keys, the queries being the last S positions; answers [S, heads, K]."""
    repeat = shape.heads // shape.groups
    k, v = k.repeat_interleave(repeat, dim=0), v.repeat_interleave(repeat, dim=0)
    scores = q @ k.mT * (shape.scaling if shape.scaling is not None else 1 / math.sqrt(K))
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    queries, keys = scores.shape[1:]
    for row in range(queries):
        position = keys - queries + row
        for key in range(keys):
            if key > position or (shape.window is not None and key <= position - shape.window):
                scores[:, row, key] = -math.inf
    return (scores.softmax(-1) @ v).transpose(0, 1)


def _run(context: AttentionContext, q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    output, weights = packed_attention(
        _module(context), q, k, v, None, scaling=shape.scaling, sliding_window=shape.window, softcap=shape.softcap
    )
    assert weights is None
    return output


@pytest.mark.parametrize("lengths", [LENGTHS, (5, 5, 5, 2, 2, 1, 1, 5, 5)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_each_segment_is_causal_attention_over_its_own_rows(name: str, lengths: Sequence[int]) -> None:
    shape, total = SHAPES[name], sum(lengths)
    inputs = [_rows(heads, total, seed) for seed, heads in enumerate((shape.heads, shape.groups, shape.groups))]
    packed = [tensor.clone().requires_grad_() for tensor in inputs]
    output = _run(AttentionContext([Segment(n) for n in lengths]), *packed, shape)
    assert output.shape == (1, total, shape.heads, K)
    plain = [tensor.clone().requires_grad_() for tensor in inputs]
    parts = zip(*(tensor[0].split(lengths, dim=1) for tensor in plain), strict=True)
    expected = torch.cat([_textbook(*part, shape) for part in parts])
    assert torch.allclose(output[0], expected, rtol=1e-12, atol=1e-13)
    weights = torch.randn(output[0].shape, generator=torch.Generator().manual_seed(9), dtype=output.dtype)
    (output[0] * weights).sum().backward()
    (expected * weights).sum().backward()
    for own, reference in zip(packed, plain, strict=True):
        assert torch.allclose(own.grad, reference.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_a_segment_has_the_bits_it_has_alone(name: str, dtype: torch.dtype) -> None:
    """Whatever stands beside it, NaN included, forward and backward."""
    shape, total = SHAPES[name], sum(LENGTHS)
    inputs = [_rows(heads, total, seed, dtype) for seed, heads in enumerate((shape.heads, shape.groups, shape.groups))]
    start, stop = LENGTHS[0] + LENGTHS[1], sum(LENGTHS[:3])
    results = []
    for beside in (1.0, -3.0, math.nan):
        for lengths in (LENGTHS, (4, 2, 12, 1, 2)):
            changed = [tensor.clone() for tensor in inputs]
            for tensor in changed:
                tensor[:, :, :start] *= beside
                tensor[:, :, stop:] *= beside
                tensor.requires_grad_()
            output = _run(AttentionContext([Segment(n) for n in lengths]), *changed, shape)
            output[:, start:stop].square().sum().backward()
            results.append([output[:, start:stop], *(tensor.grad[:, :, start:stop] for tensor in changed)])
    alone = [tensor[:, :, start:stop].clone().requires_grad_() for tensor in inputs]
    output = _run(AttentionContext([Segment(stop - start)]), *alone, shape)
    output.square().sum().backward()
    results.append([output, *(tensor.grad for tensor in alone)])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 40])
@pytest.mark.parametrize("name", SHAPES)
def test_segments_of_equal_length_are_each_as_alone_bit_for_bit(name: str, rows: int, dtype: torch.dtype) -> None:
    """They run as a batch; one that is not finite is nobody else's affair."""
    shape, count = SHAPES[name], 4
    total = count * rows + 2
    inputs = [_rows(heads, total, seed, dtype) for seed, heads in enumerate((shape.heads, shape.groups, shape.groups))]
    inputs[2][:, :, rows : 2 * rows] = math.nan

    def run(own: slice, segments: Sequence[Segment]) -> list[Tensor]:
        leaves = [tensor[:, :, own].clone().requires_grad_() for tensor in inputs]
        output = _run(AttentionContext(segments), *leaves, shape)
        output.square().sum().backward()
        return [output.detach().transpose(1, 2), *(leaf.grad for leaf in leaves)]

    context = [Segment(rows)] * count + [Segment(2)]
    assert len(AttentionContext(context).runs) == (count + 1 if rows == 1 else 1 if rows == 2 else 2)
    together = run(slice(None), context)
    for index in range(count):
        own = slice(index * rows, (index + 1) * rows)
        for one, other in zip(together, run(own, [Segment(rows)]), strict=True):
            assert torch.equal(one[:, :, own], other) or index == 1
            assert bool(other.isfinite().all()) == (index != 1)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("steps", [(9,), (1,) * 9, (4, 1, 3, 1), (1, 8)], ids=str)
def test_from_a_cache_it_sees_what_went_before(name: str, steps: Sequence[int]) -> None:
    """A sequence fed in steps of any size, beside another one, gives the rows of the whole."""
    shape = SHAPES[name]
    heads = (shape.heads, shape.groups, shape.groups)
    inputs = [_rows(count, 9, seed) for seed, count in enumerate(heads)]
    beside = [_rows(count, 2 * len(steps), seed + 5) for seed, count in enumerate(heads)]
    cache, rows, start = KVCache(), [], 0
    for number, size in enumerate(steps):
        own = [tensor[:, :, start : start + size] for tensor in inputs]
        other = [tensor[:, :, 2 * number : 2 * number + 2] for tensor in beside]
        context = AttentionContext([Segment(2, 7), Segment(size, 3), Segment(1)], cache)
        filler = [_rows(count, 1, 8) for count in heads]
        packed = [torch.cat(parts, dim=2) for parts in zip(other, own, filler, strict=True)]
        rows.append(_run(context, *packed, shape)[0, 2 : 2 + size])
        start += size
    assert torch.allclose(torch.cat(rows), _textbook(*(tensor[0] for tensor in inputs), shape), rtol=1e-12, atol=1e-13)


class _Span:
    """Keys and values of a layer, another one of each layer."""

    def __init__(self, groups: int, positions: int, seed: int, dtype: torch.dtype = torch.float64) -> None:
        self.layers = [[_rows(groups, positions, seed + 10 * n, dtype) for n in (layer, layer + 2)] for layer in (0, 1)]
        self.leaves = [tensor.requires_grad_() for pair in self.layers for tensor in pair]

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        key, value = self.layers[layer]
        return key, value


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", SHAPES)
def test_spans_come_before_the_rows_of_their_segment_alone(name: str, layer: int) -> None:
    """As one longer sequence of which the last rows ask, gradients included; windows count spans in."""
    shape, total = SHAPES[name], sum(LENGTHS)
    heads = (shape.heads, shape.groups, shape.groups)
    inputs = [_rows(count, total, seed).clone().requires_grad_() for seed, count in enumerate(heads)]
    twins = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    near, far = _Span(shape.groups, 2, 31), _Span(shape.groups, 6, 47)
    near_twin, far_twin = _Span(shape.groups, 2, 31), _Span(shape.groups, 6, 47)
    spans = [(near,), (far, near), (), (near,)]
    segments = [Segment(n, spans=own) for n, own in zip(LENGTHS, spans, strict=True)]
    output, _ = packed_attention(
        _module(AttentionContext(segments), layer),
        *inputs,
        None,
        scaling=shape.scaling,
        sliding_window=shape.window,
        softcap=shape.softcap,
    )
    expected = []
    parts = zip(*(tensor[0].split(LENGTHS, dim=1) for tensor in twins), strict=True)
    for (q, k, v), own in zip(parts, [(near_twin,), (far_twin, near_twin), (), (near_twin,)], strict=True):
        pairs = [span.keys_values(layer) for span in own]
        keys = torch.cat([*(key[0] for key, _ in pairs), k], dim=1)
        values = torch.cat([*(value[0] for _, value in pairs), v], dim=1)
        expected.append(_textbook(q, keys, values, shape))
    assert torch.allclose(output[0], torch.cat(expected), rtol=1e-12, atol=1e-13)
    weights = torch.randn(output[0].shape, generator=torch.Generator().manual_seed(9), dtype=output.dtype)
    (output[0] * weights).sum().backward()
    (torch.cat(expected) * weights).sum().backward()
    for own, reference in zip(
        [*inputs, *near.leaves, *far.leaves], [*twins, *near_twin.leaves, *far_twin.leaves], strict=True
    ):
        assert (own.grad is None) == (reference.grad is None)
        assert own.grad is None or torch.allclose(own.grad, reference.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_a_span_given_to_the_first_pass_stays_in_the_cache(name: str) -> None:
    shape = SHAPES[name]
    heads = (shape.heads, shape.groups, shape.groups)
    q, k, v = (_rows(count, 9, seed) for seed, count in enumerate(heads))
    span, cache, rows = _Span(shape.groups, 5, 31), KVCache(), []
    with torch.no_grad():
        for start, stop in ((0, 4), (4, 5), (5, 9)):
            own = [tensor[:, :, start:stop] for tensor in (q, k, v)]
            segment = Segment(stop - start, 3, (span,) if start == 0 else ())
            rows.append(_run(AttentionContext([segment], cache), *own, shape)[0])
        key, value = (
            torch.cat([own[0], rest[0]], dim=1) for own, rest in zip(span.keys_values(0), (k, v), strict=True)
        )
    assert torch.allclose(torch.cat(rows), _textbook(q[0], key, value, shape), rtol=1e-12, atol=1e-13)


def test_a_span_takes_the_precision_of_the_rows() -> None:
    span = _Span(4, 3, 31, torch.float32)
    rows = [_rows(4, 5, seed).to(torch.bfloat16) for seed in range(3)]
    output = _run(AttentionContext([Segment(5, spans=(span,))]), *rows, Shape())
    output.float().square().sum().backward()
    assert output.dtype is torch.bfloat16 and span.leaves[0].grad.dtype is torch.float32
    assert bool(span.leaves[0].grad.any())


def test_it_counts_its_calls_by_layer_and_refuses_to_run_outside_a_pass() -> None:
    context = AttentionContext([Segment(3)])
    inputs = [_rows(2, 3, seed) for seed in range(3)]
    for layer in (0, 1, 1):
        packed_attention(_module(context, layer), *inputs, None)
    assert context.calls == {0: 1, 1: 2}
    module = _module(context)
    module.__dict__["muxtune_slot"].current = None
    with pytest.raises(AssertionError, match="outside a pass"):
        packed_attention(module, *inputs, None)


def test_a_mask_is_made_once_for_all_layers() -> None:
    """Or each layer of a pass that trains would hold one, of as many numbers as queries times keys."""
    context = AttentionContext([Segment(6, 3), Segment(6, 4), Segment(5)], _seen_before(4))
    inputs = [_rows(4, 17, seed).requires_grad_() for seed in range(3)]
    held: set[int] = set()

    def note(kept: Tensor) -> Tensor:
        if kept.shape[-2:] == (6, 10):
            held.add(kept.untyped_storage().data_ptr())
        return kept

    with torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
        for layer in (0, 1, 2):
            packed_attention(_module(context, layer), *inputs, None)
    assert len(held) == 1 == len(context.masks)


def _seen_before(positions: int) -> KVCache:
    """A cache that holds as many positions of two sequences, in three layers."""
    cache = KVCache()
    for layer in (0, 1, 2):
        for slot in (3, 4):
            cache.extend(layer, slot, _rows(4, positions, 5), _rows(4, positions, 6))
    return cache


def test_segments_that_do_not_cover_the_rows_are_an_error() -> None:
    with pytest.raises(RuntimeError):
        packed_attention(_module(AttentionContext([Segment(2)])), *(_rows(2, 3, seed) for seed in range(3)), None)
