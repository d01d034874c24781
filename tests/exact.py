"""`exact_fp64()`: inside it, arithmetic on fp64 tensors stays fp64, whatever a model's code casts to fp32.

transformers casts to fp32 on purpose: RMSNorm's variance, rotary angles, eager attention's softmax, logits before the
loss. Good for bf16, ruinous for a proof in fp64 (errors of 1e-7 where 1e-12 is wanted). A torch function mode turns
each cast of an fp64 or integer tensor to fp32 into one to fp64; fp32 tensors stay as they are. Run both sides of a
comparison inside it. It holds for the thread that enters it, which on CPU runs the backward pass too; there torch
leaves function modes out, so a hand-written backward enters this one again (recomputation runs whole blocks in there).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_CASTS = frozenset({torch.Tensor.to, torch.Tensor.type})
_WITH_DTYPE = frozenset(
    {F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, torch.Tensor.softmax, torch.Tensor.log_softmax}
)


class _ExactFp64(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and _is_exact(args[0]):
            if func is torch.Tensor.float:
                return args[0].double()
            if func in _CASTS or func in _WITH_DTYPE:
                args = tuple(_widened(value) for value in args)
                kwargs = {key: _widened(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _is_exact(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float64 or not tensor.dtype.is_floating_point


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def exact_fp64() -> Iterator[None]:
    """No cast of an fp64 or integer tensor ends in fp32 while this is open."""
    with _ExactFp64() as mode, _held_in_backward(mode):
        yield


@contextmanager
def _held_in_backward(mode: TorchFunctionMode) -> Iterator[None]:
    apply = BackwardCFunction.apply

    def under_the_mode(node: BackwardCFunction, *grads: Any) -> Any:
        with mode:
            return apply(node, *grads)

    BackwardCFunction.apply = under_the_mode
    try:
        yield
    finally:
        BackwardCFunction.apply = apply
