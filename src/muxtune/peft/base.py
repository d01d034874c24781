"""The one representation of PEFT: BaseOp, Adapter, Dispatch, Aggregate.

A *BaseOp* is a frozen operator of the backbone: a linear, a norm, a whole feed-forward sublayer. An *Adapter* is one
task's trainable parameters: an `AdapterModule` at each attach point it hooks. *Dispatch* says which rows of a
micro-batch go to which adapter - always a slice, never a mask or a one-hot sum, so that one task's NaN cannot reach
another (0 * NaN is NaN). *Aggregate* is how a module's output joins the BaseOp's, and it is the module's own affair:

    y = aggregate(x, BaseOp(input_rows(x)))        on the module's rows only

A module says that once, plainly, through autograd (`forward_plain`, and `input_rows` where the BaseOp itself must see
other rows). It may also come by hand (`HandWritten`), which is faster; a test holds the two equal. By hand, a pass is

    forward     input_rows        what the BaseOp sees, where the module changes that
                BaseOp            once, on the rows of all tasks
                forward_rows      the module's share, in place on its output rows
    backward    backward_output   parameters; the gradient of the output becomes that of the BaseOp's output, in place
                BaseOp            its input gradient, once
                backward_input    that becomes the gradient of the module's own rows, in place

Legend: t rows of one task, I input features, O output features, V virtual rows, E embedding width, P prefix positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from muxtune.peft.dropout import RowKeys
from muxtune.peft.parameters import FlatParameters
from muxtune.spec.peft import Place


class BaseOp(Protocol):
    """A frozen operator of the backbone, as the PEFT layer sees it. `kind`: linear, norm, mlp, embedding or head."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def roles(self) -> frozenset[str]: ...
    @property
    def layer(self) -> int | None: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def biased(self) -> bool: ...
    def forward(self, x_TI: Tensor) -> Tensor: ...


class LinearBase(BaseOp, Protocol):
    """A linear y = x W^T + b; its backward needs no graph."""

    @property
    def transposed(self) -> bool: ...
    @property
    def weight_OI(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor | None: ...
    def input_gradient(self, grad_TO: Tensor) -> Tensor: ...


class JoinedLinears(LinearBase, Protocol):
    """Linears that read the same rows, as one operator: its output is theirs, side by side in the order of `members`.
    Modules hook the members; a hook gets this."""

    @property
    def members(self) -> Sequence[LinearBase]: ...


class NormBase(BaseOp, Protocol):
    """A norm over the model dimension; `parameters` are its weight and perhaps its bias."""

    @property
    def parameters(self) -> Mapping[str, Tensor]: ...
    def forward_with(self, parameters: Mapping[str, Tensor], x_tD: Tensor) -> Tensor: ...


class EndBase(BaseOp, Protocol):
    """The token embedding or the head. A model may tie both to one `table`."""

    @property
    def table(self) -> Tensor:
        """The weight, a row an entry of the vocabulary; without memory where the model was never loaded."""
        ...


class EmbeddingBase(EndBase, Protocol):
    """Rows looked up by id and scaled; its input rows are ids, [t] int64."""

    @property
    def scale(self) -> float: ...
    @property
    def padding_id(self) -> int | None:
        """The entry for which nothing is learned."""
        ...


class BackboneView(Protocol):
    """What a PEFT type may know of a backbone when it builds an adapter."""

    @property
    def ops(self) -> Mapping[str, BaseOp]:
        """Every attach point of the layers by full module path, in their order."""
        ...

    @property
    def ends(self) -> Mapping[str, EndBase]:
        """The token embedding and the head, by full module path: attach points that are only hooked by name."""
        ...

    @property
    def module_names(self) -> Sequence[str]:
        """Every module path of the model, attach point or not."""
        ...

    @property
    def places(self) -> Sequence[Place]:
        """All attach points, as specs see them."""
        ...

    @property
    def attention_shape(self) -> tuple[int, int, int]:
        """Query heads, key/value heads and the width of one, of every layer."""
        ...


class Prefix(Protocol):
    """Learned keys and values that each of a task's queries sees before its own sequence."""

    @property
    def length(self) -> int: ...
    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """[1, G, P, K] each, for G key/value heads of width K."""
        ...


class AdapterModule(Protocol):
    """What one adapter does at one attach point, on its own rows only."""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The leaves it trains, in a fixed order; gradients are added to their `.grad`."""
        ...

    @property
    def by_hand(self) -> bool:
        """Whether it is a `HandWritten`."""
        ...

    @property
    def changes_input(self) -> bool:
        """Whether the BaseOp must see `input_rows` instead of the rows themselves."""
        ...

    def input_rows(self, x_tI: Tensor, keys: RowKeys | None) -> Tensor:
        """What the BaseOp sees, through autograd. Asked only where `changes_input`."""
        ...

    def forward_plain(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        """The output rows, through autograd, from the rows that came in and the BaseOp's output."""
        ...


Kept = tuple[Tensor, ...]


class HandWritten(Protocol):
    """A module's steps without autograd, each on its own rows. `keys` None switches dropout off."""

    @property
    def changes_input(self) -> bool:
        """See `AdapterModule`; under `no_grad`, `input_rows` is the first step."""
        ...

    @property
    def rescales(self) -> bool:
        """Whether `backward_output` writes over the gradient it is given. One that only adds need not."""
        ...

    def input_rows(self, x_tI: Tensor, keys: RowKeys | None) -> Tensor:
        """See `AdapterModule`."""
        ...

    def forward_rows(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Kept:
        """Aggregate into `y_tO`, the BaseOp's output, in place; returns what the backward needs."""
        ...

    def backward_output(self, x_tI: Tensor, kept: Kept, grad_y_tO: Tensor, keys: RowKeys | None) -> Kept:
        """Add to the parameters' gradients, and turn `grad_y_tO` into the gradient of the BaseOp's output where that
        is another; returns what `backward_input` needs."""
        ...

    def backward_input(self, x_tI: Tensor, kept: Kept, grad_x_tI: Tensor, keys: RowKeys | None) -> None:
        """`grad_x_tI` comes as the BaseOp's input gradient; `kept` is from `backward_output`. Left out where nothing
        below trains."""
        ...


class PlainModule:
    """What most modules share: the parameters are kept, the BaseOp's input is left alone, autograd does the rest."""

    by_hand = False
    changes_input = False
    rescales = False

    def __init__(self, *parameters: Tensor) -> None:
        self.parameters: tuple[Tensor, ...] = parameters

    def input_rows(self, x_tI: Tensor, keys: RowKeys | None) -> Tensor:
        """The rows as they are."""
        return x_tI


@dataclass(frozen=True, slots=True)
class Slot:
    """Where an adapter's buffers lie: `index` times `distance` elements into a slab, whose identity is `slab`."""

    slab: object
    index: int
    distance: int


class Adapter:
    """One task's trainable parameters: a module at each attach point, their values in one flat buffer.

    A type may also put learned positions before each of the task's sequences, whose own positions go on from there:
    `prefix`, which is keys and values only, and then `virtual_VE`, which are input rows like those of V tokens. The
    two are read anew for each pass.

    Args:
        fixed: named tensors that belong to the adapter and are never trained, but without which its parameters mean
            nothing (the places of a sparse delta, say); they travel with the parameters.
        stochastic: whether training needs row keys (dropout).
    """

    def __init__(
        self,
        modules: Mapping[str, AdapterModule],
        parameters: FlatParameters,
        *,
        fixed: Mapping[str, Tensor] | None = None,
        stochastic: bool = False,
    ) -> None:
        self.modules = modules
        self.parameters = parameters
        self.fixed: Mapping[str, Tensor] = fixed or {}
        self.stochastic = stochastic

    movable = False  # whether it may lie in a slab with others of its layout (`muxtune.peft.slab`)
    slot: Slot | None = None

    def moved(self, slot: Slot) -> None:
        """Its parameters have gone to `slot`: views of them that are kept have to be made anew."""
        self.slot = slot

    prefix: Prefix | None = None
    virtual_VE: Tensor | None = None

    @property
    def virtual_rows(self) -> int:
        """Learned rows before a sequence's own."""
        return self.virtual_VE.shape[0] if self.virtual_VE is not None else 0

    @property
    def lead(self) -> int:
        """Positions before a sequence's own first token."""
        return (self.prefix.length if self.prefix is not None else 0) + self.virtual_rows

    @property
    def layout(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Name, shape and dtype of all that `state` holds."""
        held = {**self.parameters.views, **self.fixed}
        return {name: (tensor.shape, tensor.dtype) for name, tensor in held.items()}

    def state(self) -> dict[str, Tensor]:
        """Copies, on the CPU, of everything that makes it the adapter it is: parameters and fixed tensors."""
        fixed = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in self.fixed.items()}
        return self.parameters.export() | fixed

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the values of `state`, which has this adapter's names and shapes."""
        assert state.keys() == self.layout.keys(), "the state of another adapter"
        self.parameters.load({name: state[name] for name in self.parameters.views})
        for name, tensor in self.fixed.items():
            assert state[name].shape == tensor.shape, name
            tensor.copy_(state[name])
        self.refresh()

    def refresh(self) -> None:
        """Make anew what is derived from the parameters (DoRA's norms, say): called after every change of values."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Rows [start, stop) of a micro-batch go to `adapter`; `keys` (one a row) feed its dropout, None in evaluation."""

    start: int
    stop: int
    adapter: Adapter
    keys: RowKeys | None
