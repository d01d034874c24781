"""BaseOps of the backbone: frozen operators that adapters can hook, each an attach point.

Three kinds: *linears*; *norms*; *MLPs*, the whole feed-forward sublayer as one operator. `install` leaves the module
tree as it is (names, weights and hash unchanged) and only routes an operator's forward through its op. Without a hook
in the pass in progress that is the plain operator; with one, the hook gets the op and its input rows and answers the
output rows. What a hook does with them is the PEFT layer's affair.

Legend: T packed tokens, I input features, O output features, D model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from muxtune.models.attention import AttentionContext
from muxtune.models.recipes import Recipe

Hook = Callable[[Any, Tensor], Tensor]  # the op and its rows [T, I] -> [T, O]


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Embedding rows from row `start` of a pass on, such as learned ones; they may need a gradient."""

    start: int
    rows_VE: Tensor


@dataclass(slots=True)
class Pass:
    """One pass of the backbone: who attends to whom, which attach points are hooked, and which rows of the embedding
    are given instead of looked up (ascending, none twice)."""

    attention: AttentionContext
    hooks: Mapping[str, Hook] = field(default_factory=dict)
    given: Sequence[GivenRows] = ()


class PassSlot:
    """Where a backbone's modules find the pass in progress; a block sets it just before it runs its layer."""

    __slots__ = ("current",)

    def __init__(self) -> None:
        self.current: Pass | None = None


Kind = Literal["linear", "norm", "mlp"]


class Op:
    """What all kinds share: a name, a place, and the routing of the module's forward.

    `roles` are the recipe's names for it (q, k, v, o, mlp_in, mlp_out; mlp; norm), `layer` its decoder layer (None for
    the final norm).
    """

    kind: Kind

    def __init__(
        self, name: str, module: nn.Module, slot: PassSlot, *, roles: frozenset[str], layer: int | None
    ) -> None:
        self.name = name
        self.roles = roles
        self.layer = layer
        self._slot = slot
        self._module = module
        self._own_forward = type(module).forward
        module.__dict__["forward"] = self

    in_features: int
    out_features: int

    @property
    def biased(self) -> bool:
        """Whether the operator adds a bias of its own to its output."""
        return self.kind != "mlp" and isinstance(getattr(self._module, "bias", None), Tensor)

    def forward(self, x_TI: Tensor) -> Tensor:
        """The frozen operator on T rows."""
        y: Tensor = self._own_forward(self._module, x_TI[None])[0]
        return y

    def __call__(self, x: Tensor) -> Tensor:
        """What the module's forward becomes: [..., I] -> [..., O], through the pass's hook where there is one.

        Hooked or not, the kernel sees the same [T, I]: whether a co-runner hooks this op may not change a bit.
        """
        current = self._slot.current
        hook = current.hooks.get(self.name) if current is not None else None
        if x.shape[-1] != self.in_features:  # a norm over heads, say: not an attach point after all
            own: Tensor = self._own_forward(self._module, x)
            return own
        x_TI = x.reshape(-1, self.in_features)
        y_TO = hook(self, x_TI) if hook is not None else self.forward(x_TI)
        return y_TO if x.dim() == 2 else y_TO.view(*x.shape[:-1], self.out_features)


class LinearOp(Op):
    """A frozen linear y = x W + b, stored either way round: nn.Linear keeps [O, I], GPT-2's Conv1D [I, O]."""

    kind: Kind = "linear"

    def __init__(
        self, name: str, module: nn.Module, slot: PassSlot, *, roles: frozenset[str], layer: int | None
    ) -> None:
        super().__init__(name, module, slot, roles=roles, layer=layer)
        weight = module.weight
        assert isinstance(weight, Tensor) and weight.ndim == 2
        self.transposed = isinstance(module, Conv1D)
        self.weight: Tensor = weight.detach()
        bias = module.bias
        self.bias: Tensor | None = bias.detach() if isinstance(bias, Tensor) else None
        self.out_features, self.in_features = weight.shape if not self.transposed else weight.shape[::-1]

    @property
    def weight_OI(self) -> Tensor:
        return self.weight.T if self.transposed else self.weight

    def forward(self, x_TI: Tensor) -> Tensor:
        """x W + b."""
        return F.linear(x_TI, self.weight_OI, self.bias)

    def input_gradient(self, grad_TO: Tensor) -> Tensor:
        """dL/dx of `forward`: the only gradient a frozen operator ever needs."""
        return grad_TO @ (self.weight.T if self.transposed else self.weight)


class NormOp(Op):
    """A frozen normalisation over the model dimension, with a weight and perhaps a bias."""

    kind: Kind = "norm"

    def __init__(
        self, name: str, module: nn.Module, slot: PassSlot, *, roles: frozenset[str], layer: int | None
    ) -> None:
        super().__init__(name, module, slot, roles=roles, layer=layer)
        self.parameters = {key: value.detach() for key, value in module.named_parameters(recurse=False)}
        self.in_features = self.out_features = int(self.parameters["weight"].shape[0])
        self.run_with: Callable[[Mapping[str, Tensor], Tensor], Tensor] | None = None  # where a block has its own

    def forward_with(self, parameters: Mapping[str, Tensor], x_tD: Tensor) -> Tensor:
        """The same normalisation with other values of its parameters, through autograd."""
        if self.run_with is not None:
            return self.run_with(parameters, x_tD)
        twin = copy.copy(self._module)
        twin.__dict__["_parameters"] = {**self._module._parameters, **parameters}
        y: Tensor = self._own_forward(twin, x_tD[None])[0]
        return y


class MlpOp(Op):
    """A whole feed-forward sublayer; its own linears stay attach points of their own."""

    kind: Kind = "mlp"

    def __init__(
        self, name: str, module: nn.Module, slot: PassSlot, *, roles: frozenset[str], layer: int | None, width: int
    ) -> None:
        super().__init__(name, module, slot, roles=roles, layer=layer)
        self.in_features = self.out_features = width
        self.run: Callable[[Tensor], Tensor] | None = None  # [T, D] -> [T, D], where it is not the module that runs

    def forward(self, x_TI: Tensor) -> Tensor:
        """The sublayer; hooks of its linears take part."""
        return self.run(x_TI) if self.run is not None else super().forward(x_TI)


def install(layers: Mapping[str, nn.Module], slot: PassSlot, recipe: Recipe, width: int) -> dict[str, Op]:
    """Route the operators of `layers` (path -> decoder layer) through ops; returns them by full module path.

    `width` is the model dimension: norms over anything else (heads) are left alone.
    """
    ops: dict[str, Op] = {}
    for index, (path, layer) in enumerate(layers.items()):
        for name, module in layer.named_modules():
            if hasattr(module, "layer_idx"):
                module.__dict__["muxtune_slot"] = slot
            full = f"{path}.{name}"
            roles = recipe.roles(name)
            if isinstance(module, nn.Linear | Conv1D):
                ops[full] = LinearOp(full, module, slot, roles=roles, layer=index)
            elif is_norm(module, width):
                ops[full] = NormOp(full, module, slot, roles=frozenset({"norm"}), layer=index)
            elif name == recipe.mlp:
                ops[full] = MlpOp(full, module, slot, roles=frozenset({"mlp"}), layer=index, width=width)
    return ops


def is_norm(module: nn.Module, width: int) -> bool:
    """Whether a module normalises rows of the model dimension, judged by its name and its parameters' shape."""
    own = dict(module.named_parameters(recurse=False))
    named = "norm" in type(module).__name__.lower()
    return named and set(own) <= {"weight", "bias"} and "weight" in own and own["weight"].shape == (width,)
