"""DoRA (Liu et al., 2024): a frozen linear whose rows have trained lengths m and directions moved by a LoRA.

    y = m / n * (W + s B A) x + b        n = ||W + s B A|| by rows, a constant to the gradient (the paper's 4.3)

m starts at ||W||, so training starts from the backbone itself. n depends on the parameters alone: it is made once an
optimizer step, not in each pass, from n^2 = ||W||^2 + 2 s sum(W A^T . B) + s^2 sum(B A A^T . B), which reads W once and
writes no matrix of its size. With dropout the whole adapted product sees the dropped-out x, as in peft 0.21, which
costs one more product with W on the task's own rows.

Legend: t rows of one task, I input features, O output features, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from muxtune.peft.base import Kept, LinearBase
from muxtune.peft.dropout import RowKeys
from muxtune.peft.lora import LowRankAdapter, LowRankModule, draw_start, low_rank_parameters, pair_of
from muxtune.peft.pair_stack import PairStack


class DoraModule(LowRankModule):
    """m / n * (W x + s B A x) + b at one attach point."""

    by_hand = True
    rescales = True

    def __init__(
        self, op: LinearBase, lora_a_RI: Tensor, lora_b_OR: Tensor, magnitude_O: Tensor, scale: float, dropout: float
    ) -> None:
        super().__init__(op.name, lora_a_RI, lora_b_OR, scale, dropout)
        assert magnitude_O.grad is not None
        self.parameters = (lora_a_RI, lora_b_OR, magnitude_O)
        self._grad_magnitude_O = magnitude_O.grad
        self._pair = PairStack.of(lora_a_RI, lora_b_OR, scale)
        self._op = op
        self._weight_squares_O = self._weight_OI.square().sum(1)
        self.norm_O = torch.empty_like(magnitude_O, requires_grad=False)
        self._length_O, self._beyond_O = torch.empty_like(self.norm_O), torch.empty_like(self.norm_O)
        self.refresh()

    def refresh(self) -> None:
        """Make n anew, and l = m / n."""
        self.measure(self.squares())

    @torch.no_grad()
    def squares(self) -> Tensor:
        """n^2 [O]; of an operator that has a part of its inputs, that part of the sum. Ones where W has no memory."""
        if self._weight_squares_O.is_meta:
            return torch.ones_like(self.norm_O)
        a_RI, b_OR, _ = self.parameters
        b_RO = b_OR.T  # as it lies: with [O, R] and a small rank the products take half as long again
        doubled_RO = torch.mm(a_RI, self._weight_OI.T).mul_(2)
        doubled_RO.addmm_(torch.mm(a_RI, a_RI.T), b_RO, alpha=self._scale)
        return torch.add(self._weight_squares_O, doubled_RO.mul_(b_RO).sum(0), alpha=self._scale)

    @torch.no_grad()
    def measure(self, squares_O: Tensor) -> None:
        """Take n^2, of all inputs."""
        self.norm_O.copy_(lengths(squares_O))
        self.rescale()

    @torch.no_grad()
    def start(self) -> None:
        """Let m be n: the backbone's own lengths, while B is zero."""
        *_, magnitude_O = self.parameters
        magnitude_O.detach().copy_(self.norm_O)
        self.rescale()

    @torch.no_grad()
    def rescale(self) -> None:
        """Make l = m / n anew, and l - 1."""
        *_, magnitude_O = self.parameters
        torch.div(magnitude_O.detach(), self.norm_O, out=self._length_O)
        torch.sub(self._length_O, 1, out=self._beyond_O)

    def forward_rows(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Kept:
        """See the head of this file; keeps A x and the whole adapted product, (W + s B A) x."""
        inputs_tI = self._inputs(x_tI, keys)
        down_1tR = self._pair.down(inputs_tI)
        if self._drops(keys):
            turned_tO = F.linear(inputs_tI, self._weight_OI)
            self._pair.add_up(turned_tO, down_1tR)
            wide_tO = y_tO.to(self._dtype, copy=True)
            self._pair.add_up(wide_tO, down_1tR)
        else:
            wide_tO = y_tO.to(self._dtype, copy=True)
            self._pair.add_up(wide_tO, down_1tR)
            turned_tO = wide_tO if self._op.bias is None else wide_tO - self._op.bias
        if y_tO.dtype == self._dtype:
            torch.addcmul(wide_tO, turned_tO, self._beyond_O, out=y_tO)
        else:
            y_tO.copy_(torch.addcmul(wide_tO, turned_tO, self._beyond_O))
        return down_1tR, turned_tO

    def backward_output(self, x_tI: Tensor, kept: Kept, grad_y_tO: Tensor, keys: RowKeys | None) -> Kept:
        """l's share goes to the pair and, but for dropout, to the BaseOp."""
        down_1tR, turned_tO = kept
        grad_tO = grad_y_tO.to(self._dtype)
        self._grad_magnitude_O += torch.mul(grad_tO, turned_tO).sum(0).div_(self.norm_O)
        beyond_tO = (grad_tO * self._beyond_O,) if self._drops(keys) else ()
        grad_tO = grad_tO * self._length_O
        if not beyond_tO:
            grad_y_tO.copy_(grad_tO)
        return (self._pair.pull(self._inputs(x_tI, keys), down_1tR, grad_tO), *beyond_tO)

    def backward_input(self, x_tI: Tensor, kept: Kept, grad_x_tI: Tensor, keys: RowKeys | None) -> None:
        """With dropout, what comes through W a second time is added: (l - 1) W^T g."""
        grad_down_1tR, *beyond_tO = kept
        if not beyond_tO and grad_x_tI.dtype == self._dtype:
            self._pair.add_back(grad_x_tI, grad_down_1tR)
            return
        own_tI = self._pair.back(grad_down_1tR)
        for grad_tO in beyond_tO:
            own_tI += torch.mm(grad_tO, self._weight_OI)
        grad_x_tI += self._drop(own_tI, keys).to(grad_x_tI.dtype)

    @property
    def _weight_OI(self) -> Tensor:
        return self._op.weight_OI.to(self._dtype)

    def forward_plain(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        *_, magnitude_O = self.parameters
        inputs_tI = self._inputs(x_tI, keys)
        length_O = magnitude_O / self.norm_O
        moved_tO = length_O * self._delta(inputs_tI)
        return (y_tO + (length_O - 1) * self._base(inputs_tI, y_tO, keys) + moved_tO).to(y_tO.dtype)

    def _base(self, inputs_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        """W x on the inputs that the pair sees: what the BaseOp has computed already, but for dropout."""
        if self._drops(keys):
            based_tO: Tensor = F.linear(inputs_tI, self._weight_OI)
            return based_tO
        wide_tO, bias_O = y_tO.to(self._dtype), self._op.bias
        return wide_tO if bias_O is None else wide_tO - bias_O


class DoraAdapter(LowRankAdapter):
    """A DoRA at each of `ops`; the arguments are those of `LoraAdapter`. `sum_squares` adds to the squares of norms
    (by attach point, in place) what other ranks have of the same rows."""

    sum_squares: Callable[[dict[str, Tensor]], None] | None = None

    def __init__(
        self,
        ops: Iterable[LinearBase],
        *,
        r: int,
        scale: float,
        dropout: float,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        ops = list(ops)
        parameters = low_rank_parameters(ops, r, dtype, device, magnitudes=True)
        draw_start(ops, parameters, seed)
        self._own = {}
        for op in ops:
            magnitude_O = parameters.views[f"{op.name}.lora_magnitude_vector"]
            module = DoraModule(op, *pair_of(op, parameters), magnitude_O, scale, dropout)
            module.start()
            self._own[op.name] = module
        super().__init__(self._own, parameters, stochastic=dropout > 0)

    def magnitudes(self) -> dict[str, Tensor]:
        """Attach point -> m [O], detached views of the live values."""
        views = self.parameters.views
        return {name: views[f"{name}.lora_magnitude_vector"].detach() for name in self.modules}

    def refresh(self) -> None:
        """The norms of the adapted rows, from the parameters as they are now."""
        squares = {name: module.squares() for name, module in self._own.items()}
        if self.sum_squares is not None:
            self.sum_squares(squares)
        for name, module in self._own.items():
            module.measure(squares[name])

    def start(self) -> None:
        """Let the trained lengths be those of the adapted rows as they are."""
        self.refresh()
        for module in self._own.values():
            module.start()


def merged(weight_OI: Tensor, lora_a_RI: Tensor, lora_b_OR: Tensor, magnitude_O: Tensor, scale: float) -> Tensor:
    """m / n * (W + s B A), in the weight's precision."""
    moved_OI = torch.addmm(weight_OI, lora_b_OR.to(weight_OI), lora_a_RI.to(weight_OI), alpha=scale)
    norm_O = lengths(moved_OI.square().sum(1))
    return moved_OI * (magnitude_O.to(norm_O) / norm_O)[:, None]


def lengths(squares_O: Tensor) -> Tensor:
    """Norms of rows from their squares. That of a row of zeros is the smallest number, since 0 / 0 would be none."""
    return squares_O.clamp_min(0).sqrt().clamp_min(torch.finfo(squares_O.dtype).tiny)
