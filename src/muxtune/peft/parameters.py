"""A task's trainable numbers in one flat buffer, and their gradient in another.

One fused optimizer step over a flat buffer costs a fraction of one over hundreds of small tensors (2 ms against
27-49 ms for 210 LoRA pairs), the gradient norm is one reduction, and a checkpoint is two copies. Each named parameter
is a view; its `.grad` is a view of the gradient buffer, so whoever accumulates into it - autograd or a hand-written
backward - writes where the optimizer reads.

Views start at multiples of 16 elements: kernels may then be chosen by size and never by where a view happens to lie.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from muxtune.peft.pages import zeros

_ALIGNMENT = 16


class FlatParameters:
    """Named parameters over one buffer. `shapes` fixes their order, and so the meaning of every offset.

    The matrices in `columns_first` lie in the buffer transposed; their views are as `shapes` says all the same.

    Attributes:
        values: the flat buffer, float32 or float64, gaps between views zero.
        gradient: the same shape; gaps stay zero, so norms over the whole buffer are exact.
        views: name -> leaf tensor that requires grad.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        columns_first: Collection[str] = (),
    ) -> None:
        self._columns_first = frozenset(columns_first)
        self._offsets: dict[str, int] = {}
        total = 0
        for name, shape in shapes.items():
            self._offsets[name] = total
            size = torch.Size(shape).numel()
            total += size + -size % _ALIGNMENT
        self.values, _ = zeros(total, dtype=dtype, device=device)
        self.gradient, _ = zeros(total, dtype=dtype, device=device)
        self.views: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            leaf = self._placed(self.values, name, shape).detach().requires_grad_()
            leaf.grad = self._placed(self.gradient, name, shape)
            self.views[name] = leaf

    @property
    def count(self) -> int:
        """Trainable numbers, gaps not counted."""
        return sum(view.numel() for view in self.views.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of values, gradient and two optimizer moments."""
        return 4 * self.values.numel() * self.values.element_size()

    @torch.no_grad()
    def move(self, values: Tensor, gradient: Tensor) -> None:
        """Go over to other buffers: `values` may hold anything, `gradient` is zero, as this one's still is. The leaves
        are the same ones; views of them are not."""
        values.copy_(self.values)
        self.values, self.gradient = values, gradient
        for name, leaf in self.views.items():
            shape = tuple(leaf.shape)
            leaf.data = self._placed(values, name, shape)
            leaf.grad = self._placed(gradient, name, shape)

    def named(self, buffer: Tensor) -> dict[str, Tensor]:
        """Views of another buffer of this size (an optimizer's moment, say), by parameter."""
        return {name: self._placed(buffer, name, tuple(leaf.shape)) for name, leaf in self.views.items()}

    @torch.no_grad()
    def keep(self, names: Collection[str]) -> None:
        """Forget all but these, memory and all. The leaves that stay are the same ones; views of them are not."""
        kept = {name: leaf for name, leaf in self.views.items() if name in names}
        shapes = {name: tuple(leaf.shape) for name, leaf in kept.items()}
        made = FlatParameters(shapes, self.values.dtype, self.values.device, columns_first=self._columns_first)
        for name in self.views.keys() - kept.keys():
            del self.views[name]
        self._offsets = made._offsets
        for name, leaf in kept.items():
            made.views[name].copy_(leaf)
            leaf.data = self._placed(made.values, name, shapes[name])
            leaf.grad = self._placed(made.gradient, name, shapes[name])
        self.values, self.gradient = made.values, made.gradient

    def zero_gradient(self) -> None:
        self.gradient.zero_()

    def export(self) -> dict[str, Tensor]:
        """Copies of the values by name, on the CPU."""
        return {name: view.detach().cpu().clone().contiguous() for name, view in self.views.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy values in by name; the names and shapes must be exactly these."""
        assert tensors.keys() == self.views.keys(), "parameters of another adapter"
        for name, view in self.views.items():
            assert tensors[name].shape == view.shape, name
            view.copy_(tensors[name])

    def _placed(self, buffer: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
        strides = [1] * len(shape)
        if name in self._columns_first:
            strides[-1] = shape[0]
        else:
            for dim in range(len(shape) - 1, 0, -1):
                strides[dim - 1] = strides[dim] * shape[dim]
        return buffer.as_strided(shape, strides, buffer.storage_offset() + self._offsets[name])
