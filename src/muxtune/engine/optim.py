"""One task's optimizer: AdamW over its flat buffer, clipped by the task's own gradient norm.

PyTorch's fused AdamW does the arithmetic; over one flat tensor it is a single kernel. The state that a bit-exact resume
needs is the two moments and the step count.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from muxtune.peft.parameters import FlatParameters


class FlatAdamW:
    """betas 0.9 / 0.999, eps 1e-8, as config.md fixes them.

    `norm` makes the gradient ready for a step, where other ranks have parts of it, and gives the norm of all of it.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        *,
        weight_decay: float,
        max_grad_norm: float,
        norm: Callable[[], float] | None = None,
    ) -> None:
        self._flat = nn.Parameter(parameters.values)
        self._flat.grad = parameters.gradient
        self._max_grad_norm = max_grad_norm
        self._norm = norm
        self._adamw = torch.optim.AdamW(
            [self._flat], lr=0.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay, fused=True
        )

    def gradient_norm(self) -> float:
        """Of all that was accumulated; asked once a step."""
        if self._norm is not None:
            return self._norm()
        gradient = self._flat.grad
        assert gradient is not None
        return float(torch.linalg.vector_norm(gradient))

    def step(self, lr: float, gradient_norm: float) -> None:
        """Clip (as torch's clip_grad_norm_ does; 0 switches it off) and apply one update at `lr`."""
        gradient = self._flat.grad
        assert gradient is not None and math.isfinite(gradient_norm)
        if self._max_grad_norm > 0:
            factor = self._max_grad_norm / (gradient_norm + 1e-6)
            if factor < 1:
                gradient.mul_(factor)
        self._adamw.param_groups[0]["lr"] = lr
        self._adamw.step()

    def moments(self) -> dict[str, Tensor]:
        """Copies of both moments, empty before the first step."""
        state = self._adamw.state.get(self._flat, {})
        return {name: state[name].detach().cpu().clone() for name in ("exp_avg", "exp_avg_sq") if name in state}

    def load_moments(self, moments: dict[str, Tensor], step: int) -> None:
        """Restore what `moments` gave after `step` steps."""
        if step == 0:
            return
        place = {name: moments[name].to(self._flat) for name in ("exp_avg", "exp_avg_sq")}
        counter = torch.tensor(float(step), dtype=torch.float32, device=self._flat.device)
        self._adamw.state[self._flat] = {"step": counter, **place}
