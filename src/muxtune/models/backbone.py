"""The frozen backbone: embeddings, a chain of blocks, a final norm and a head, over packed rows.

The engine drives the chain; nothing family-specific is written again. `begin` runs the model's own forward pass with
its decoder layers recorded instead of run: that yields the rows that enter the first layer (embedding scales, learned
positions and input projections included) and the arguments the model would hand each layer (rotary tables among them).
A `Block` then runs one layer; transformers' modules are the general block and the plain twin, and there is a fast one
for the LLaMA shape (`muxtune.models.fast_block`). `finish` applies what follows the layers.
The support probe (`muxtune.models.probe`) compares this composition with the untouched model at load.

Nothing here ever asks for a weight gradient: parameters are frozen, and rows below the lowest adapter carry no graph.

Legend: T packed tokens, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from muxtune.errors import ModelError
from muxtune.models.attach import LinearOp, NormOp, Op, Pass, PassSlot, install, is_norm
from muxtune.models.attention import ATTENTION_NAME
from muxtune.models.embedding import TokenEmbedding
from muxtune.models.fast_block import FastBlock, join_layer, supported
from muxtune.models.joined import LinearGroup
from muxtune.models.loss import Head
from muxtune.models.recipes import Recipe, recipe_for
from muxtune.models.recompute import recomputed
from muxtune.spec.peft import Place

_Call = tuple[
    Tensor, tuple[Any, ...], dict[str, Any]
]  # the rows, positional and keyword arguments a layer is called with


BlockName = Literal["transformers", "fast"]
BlockChoice = Literal["auto", "fast", "transformers"]


class Block(Protocol):
    """One decoder layer as the engine sees it: rows in, rows out. Chosen per engine, never per batch."""

    def forward(self, x_TD: Tensor, prelude: Prelude, current: Pass) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Prelude:
    """What the model computes before its layers: their input rows, and each layer's other arguments."""

    x_TD: Tensor
    calls: Sequence[_Call]


class TransformersBlock:
    """The general block: transformers' own decoder layer, its linears and attention routed through the pass."""

    def __init__(self, index: int, layer: nn.Module, slot: PassSlot) -> None:
        self._index = index
        self._layer_forward = _own_forward(layer)
        self._slot = slot

    def forward(self, x_TD: Tensor, prelude: Prelude, current: Pass) -> Tensor:
        """[T, D] -> [T, D], with the layer's arguments as the prelude noted them."""
        _, arguments, keywords = prelude.calls[self._index]
        self._slot.current = current
        try:
            output = self._layer_forward(x_TD[None], *arguments, **keywords)
        finally:
            self._slot.current = None
        x_1TD: Tensor = output[0] if isinstance(output, tuple) else output
        return x_1TD[0]


class _Recorder:
    """Stands in for a module's forward while `begin` runs: notes rows and arguments, and passes the rows on.

    The module itself runs later and once, through `_own_forward`. Outside `begin` the model has no layers any more, and
    says so rather than give the logits of none.
    """

    def __init__(self, slot: PassSlot, notes: list[_Call] | None = None) -> None:
        self._slot = slot
        self._notes = notes

    def __call__(self, x_1TD: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        assert self._slot.current is not None, "a model in a Backbone runs through the Backbone only"
        if self._notes is not None:
            self._notes.append((x_1TD, arguments, keywords))
        return x_1TD


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module's class, whatever stands in for it in the instance."""
    forward: Callable[..., Any] = type(module).forward.__get__(module)
    return forward


class Backbone:
    """A loaded model whose layers this program drives. Loaded once, never changed.

    `block` is what is to run a layer: `auto` is `fast` for a model that it knows, else `transformers`; the attribute
    says which it is. Raises ModelError where the model's parts cannot be found, and where `fast` does not know them.

    Attributes:
        flushes: whether passes take denormal numbers as zero, as all intra-op threads do (`muxtune.models.denormals`).
    """

    flushes = False

    def __init__(self, model: PreTrainedModel, block: BlockChoice = "auto") -> None:
        self.model = model.eval().requires_grad_(False)
        if model.config._attn_implementation != ATTENTION_NAME:
            model.set_attn_implementation(ATTENTION_NAME)
        self.config = model.config
        self.recipe: Recipe = recipe_for(model, model.config.model_type)
        self._body = model.get_submodule(self.recipe.body)
        layers = getattr(self._body, self.recipe.layers)
        self.head = _head_of(model)
        self.slot = PassSlot()
        self._notes: list[_Call] = []
        prefix = f"{self.recipe.body}.{self.recipe.layers}"
        self.block = _chosen(block, model, known=all(supported(self.recipe, self.config, layer) for layer in layers))
        if self.block == "fast":
            for layer in layers:
                join_layer(layer)
        self.ops: dict[str, Op] = install(
            {f"{prefix}.{index}": layer for index, layer in enumerate(layers)},
            self.slot,
            self.recipe,
            model.config.hidden_size,
        )
        self._after = self._install_after()
        self.embedding = _embedding_of(model, self.slot)
        self.attach_points: dict[str, LinearOp] = {
            name: op for name, op in self.ops.items() if isinstance(op, LinearOp)
        }
        self.groups: tuple[LinearGroup, ...] = ()
        self.blocks = self._blocks(prefix, list(layers))
        for layer in layers:
            layer.__dict__["forward"] = _Recorder(self.slot, self._notes)

    def _blocks(self, prefix: str, layers: Sequence[nn.Module]) -> list[Block]:
        if self.block == "transformers":
            return [TransformersBlock(index, layer, self.slot) for index, layer in enumerate(layers)]
        shape = self.attention_shape
        fast = [
            FastBlock(index, f"{prefix}.{index}", layer, self.ops, self.slot, self.config, shape)
            for index, layer in enumerate(layers)
        ]
        self.groups = tuple(group for block in fast for group in block.groups)
        return list(fast)

    def _install_after(self) -> list[Callable[[Tensor], Tensor]]:
        """What follows the layers, in order; the modules themselves then pass the rows on, as `begin` needs."""
        steps: list[Callable[[Tensor], Tensor]] = []
        for name in (self.recipe.norm, self.recipe.project_out):
            module = getattr(self._body, name) if name else None
            if module is None:
                continue
            path = f"{self.recipe.body}.{name}"
            if is_norm(module, self.config.hidden_size):
                self.ops[path] = NormOp(path, module, self.slot, roles=frozenset({"norm"}), layer=None)
                steps.append(self.ops[path])
            else:
                steps.append(_own_forward(module))
            module.__dict__["forward"] = _Recorder(self.slot)
        return steps

    @property
    def device(self) -> torch.device:
        return self.head.weight_VD.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight_VD.dtype

    @property
    def products(self) -> dict[str, LinearOp | LinearGroup]:
        """The linears of the layers as they run, by what a pass's hooks call them: joined ones as one."""
        joined = {member.name for group in self.groups for member in group.members}
        alone = {name: op for name, op in self.attach_points.items() if name not in joined}
        return {group.name: group for group in self.groups} | alone

    @property
    def max_positions(self) -> int | None:
        """Positions the model was built for, or None where its configuration does not say."""
        limit = getattr(self.config, "max_position_embeddings", None)
        return int(limit) if limit is not None else None

    @property
    def places(self) -> tuple[Place, ...]:
        """The token embedding, every attach point of the layers and the head, as specs see them."""
        points = (
            Place(op.name, op.kind, op.roles, op.layer, op.in_features, op.out_features, op.biased)
            for op in self.ops.values()
        )
        return self.embedding.place, *points, self.head.place

    @property
    def ends(self) -> dict[str, TokenEmbedding | Head]:
        """The BaseOps before and after the layers: the token embedding and the head, which may share one weight."""
        return {self.embedding.name: self.embedding, self.head.name: self.head}

    @property
    def attention_shape(self) -> tuple[int, int, int]:
        """Query heads, key/value heads and the width of one, of every layer."""
        config = self.config
        heads = int(config.num_attention_heads)
        key_value_heads = getattr(config, "num_key_value_heads", None) or heads
        return heads, int(key_value_heads), int(getattr(config, "head_dim", None) or config.hidden_size // heads)

    @property
    def module_names(self) -> list[str]:
        """Every module path of the model."""
        return [name for name, _ in self.model.named_modules() if name]

    @property
    def vocabulary(self) -> int:
        return int(self.head.weight_VD.shape[0])

    def begin(self, ids_T: Tensor, positions_T: Tensor, current: Pass) -> Prelude:
        """Everything before the first layer, for T packed rows. Only given rows and what hooks the embedding can need a
        gradient there."""
        joined = {member.name for group in self.groups for member in group.members}
        assert joined.isdisjoint(current.hooks), "a linear of a group is hooked by itself"
        self._notes.clear()
        self.slot.current = current
        hook = current.hooks.get(self.embedding.name)
        learned = hook is not None or bool(current.given)
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and learned):
                self._body(input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False)
        finally:
            self.slot.current = None
        served, self.embedding.served = self.embedding.served, ()
        asked, self.embedding.asked = self.embedding.asked, None
        used = (served is current.given or not current.given) and asked is hook
        assert used, "the model does not use its embedding"
        calls = list(self._notes)
        self._notes.clear()
        return Prelude(calls[0][0][0], calls)

    def finish(self, x_TD: Tensor, current: Pass) -> Tensor:
        """Everything between the last layer and the head."""
        x_1TD = x_TD[None]
        self.slot.current = current
        try:
            for forward in self._after:
                x_1TD = forward(x_1TD)
        finally:
            self.slot.current = None
        return x_1TD[0]

    def hidden(self, ids_T: Tensor, positions_T: Tensor, current: Pass, *, recompute: bool = False) -> Tensor:
        """The whole chain at once: what the head takes, [T, D].

        With `recompute` each block keeps its input rows only, and runs again in the backward pass: the same bits.
        """
        prelude = self.begin(ids_T, positions_T, current)
        x_TD = prelude.x_TD
        for block in self.blocks:
            if recompute and torch.is_grad_enabled():
                x_TD = recomputed(partial(block.forward, prelude=prelude, current=current), x_TD)
            else:
                x_TD = block.forward(x_TD, prelude, current)
        return self.finish(x_TD, current)


def block_named(name: object) -> BlockName:
    """The block of that name. Raises ValueError where there is none."""
    match name:
        case "fast" | "transformers":
            return name
    raise ValueError(f"there is no block named {name!r:.40}")


def _chosen(block: BlockChoice, model: PreTrainedModel, *, known: bool) -> BlockName:
    if block == "fast" and not known:
        raise ModelError(
            f"the fast block does not know all parts of this model, of type {model.config.model_type!r}",
            where="block",
            hint="block: auto, or transformers",
        )
    return "fast" if block != "transformers" and known else "transformers"


def _embedding_of(model: PreTrainedModel, slot: PassSlot) -> TokenEmbedding:
    module = model.get_input_embeddings()
    (name,) = [name for name, other in model.named_modules() if other is module]
    return TokenEmbedding(name, module, slot)


def _head_of(model: PreTrainedModel) -> Head:
    module = model.get_output_embeddings()
    names = [name for name, other in model.named_modules() if other is module]
    if not isinstance(module, nn.Linear):
        raise ModelError(f"model type {model.config.model_type!r} has no linear language-model head")
    softcap = getattr(model.config, "final_logit_softcapping", None)
    bias = module.bias.detach() if module.bias is not None else None
    return Head(module.weight.detach(), bias, float(softcap) if softcap else None, name=names[0])
