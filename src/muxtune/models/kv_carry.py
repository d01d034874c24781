"""Keys and values of sequences that train piece by piece, and the gradient that later pieces send back to them.

A sequence longer than a chunk is cut into pieces. All but the last first run forward, without a graph, and leave their
keys and values here. Then the pieces train in reverse order, each run again under autograd: a piece's queries read the
keys and values of all earlier pieces as constants, its backward adds what it owes them to a gradient buffer, and when
an earlier piece's turn comes that sum joins the gradient of its own keys and values. This is the chain rule of the
uncut sequence, cut at the keys and values, which are all that one position knows of another.

    order of passes for pieces 0..m-1:   forward 0, 1, .., m-2;  train m-1, m-2, .., 0

A pass that went forward under autograd and keeps its graph need not run again: then its backward alone takes part in
the train order. Nothing in the buffer changes that such a graph has read, for later pieces only write behind it.

`seek` says where in the sequence the next pass stands. What is learned before a sequence (a prefix, virtual rows) comes
with the first piece and is held like rows; the later pieces then owe it a gradient through their attention even where
nothing else of them is trained (`learned`). Sums are kept in at least fp32.

Cost: 2 keys-and-values of the sequence for itself and its gradient; one more forward pass of all pieces but the last,
or their activations.
Nothing is copied to be read: a piece sees a view of the buffer.

Legend: L positions of a sequence (prefix included), S of a piece, N up to and with the piece, G heads, K head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class _Held:
    """One sequence: `start` of the next pass; keys and values of each layer, and their gradients.

    `anchor` is an argument of the node below only so that autograd knows that the output depends on trained values.
    """

    positions: int
    anchor: Tensor | None
    start: int = 0
    pairs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    grads: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


class KVCarry:
    """Sequences by slot. Each is opened, run as the module's docstring says, and closed."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}

    def open(self, slot: int, positions: int, *, learned: bool = False) -> None:
        """A sequence of L = `positions`, of which the first are `learned` or not."""
        assert slot not in self._held, f"slot {slot} is open already"
        self._held[slot] = _Held(positions, torch.zeros((), requires_grad=True) if learned else None)

    def close(self, slot: int) -> None:
        del self._held[slot]

    def seek(self, slot: int, start: int) -> None:
        """The next pass brings the positions from `start` on."""
        self._held[slot].start = start

    @property
    def slots(self) -> set[int]:
        return set(self._held)

    @property
    def size_bytes(self) -> int:
        """Of everything it holds."""
        tensors = (
            tensor
            for held in self._held.values()
            for pairs in (held.pairs, held.grads)
            for pair in pairs.values()
            for tensor in pair
        )
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def extend(self, layer: int, slot: int, key_1GSK: Tensor, value_1GSK: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a piece's S positions; everything up to and with them, [1, G, N, K] each, through autograd."""
        held = self._held[slot]
        if layer not in held.pairs:
            held.pairs[layer] = (_room(key_1GSK, held.positions), _room(value_1GSK, held.positions))
        anchor = held.anchor if held.start else None
        pair: tuple[Tensor, Tensor] = _Extend.apply(key_1GSK, value_1GSK, anchor, held, layer)  # type: ignore[no-untyped-call]
        return pair


class _Extend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, key_1GSK: Tensor, value_1GSK: Tensor, anchor: Tensor | None, held: _Held, layer: int
    ) -> tuple[Tensor, Tensor]:
        start, stop = held.start, held.start + key_1GSK.shape[2]
        assert stop <= held.positions, "a piece beyond the end of its sequence"
        ctx.held, ctx.layer, ctx.start, ctx.stop = held, layer, start, stop
        keys, values = held.pairs[layer]
        keys[:, :, start:stop] = key_1GSK
        values[:, :, start:stop] = value_1GSK
        # `data`, not `detach()`: autograd would take a later piece's writing for a change of what this one has read
        return keys[:, :, :stop].data, values[:, :, :stop].data

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        held: _Held = ctx.held
        own = [grad_1GNK[:, :, ctx.start : ctx.stop] for grad_1GNK in grads]
        if ctx.layer in held.grads:
            owed = [grad[:, :, ctx.start : ctx.stop] for grad in held.grads[ctx.layer]]
            own = [(mine + late).to(mine.dtype) for mine, late in zip(own, owed, strict=True)]
        elif ctx.start > 0:
            key, value = grads
            held.grads[ctx.layer] = (_nothing_owed(key, ctx.start), _nothing_owed(value, ctx.start))
        for kept, grad_1GNK in zip(held.grads.get(ctx.layer, ()), grads, strict=False):
            kept[:, :, : ctx.start] += grad_1GNK[:, :, : ctx.start]
        return *own, None, None, None


def _room(like_1GSK: Tensor, positions: int) -> Tensor:
    _, heads, _, width = like_1GSK.shape
    return torch.empty(1, heads, positions, width, dtype=like_1GSK.dtype, device=like_1GSK.device)


def _nothing_owed(like_1GNK: Tensor, positions: int) -> Tensor:
    _, heads, _, width = like_1GNK.shape
    wide = torch.promote_types(like_1GNK.dtype, torch.float32)
    return torch.zeros(1, heads, positions, width, dtype=wide, device=like_1GNK.device)
