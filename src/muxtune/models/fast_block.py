"""The fast block: a decoder layer of the LLaMA shape over transformers' own weights, without transformers' forward.

    x  ->  norm, [q k v] as one product, rotary, packed attention, o
       ->  + x, norm, [gate up] as one product, SwiGLU, down  ->  + x

What lies between the products is `muxtune.models.elementwise`: few passes over the rows, little kept. q, k and v, and
gate and up, are `muxtune.models.joined`. Attach points are those of the general block, transformers' modules, which is
the plain twin; the probe at load holds both to the untouched model.

It is chosen when a backbone is built (`muxtune.models.backbone`), for the families and layers of which it knows every
part (`supported`): a module or a setting that is not known here sends a model to the general block. No pass changes
what runs: a hooked norm runs as it would without, and the hook then sees to its own rows.

Legend: T packed tokens, D model, F ffn, H query heads, G key/value heads, K head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from muxtune.models.attach import LinearOp, MlpOp, NormOp, Op, Pass, PassSlot
from muxtune.models.attention import packed_attention
from muxtune.models.elementwise import HeadShape, RmsNorm, add_rms_norm, heads, rms_norm, swiglu
from muxtune.models.joined import LinearGroup, join_weights, joinable
from muxtune.models.recipes import LLAMA, Recipe

if TYPE_CHECKING:
    from muxtune.models.backbone import Prelude

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_OUT = ("self_attn.o_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_OTHERS = ("self_attn", "mlp", "mlp.act_fn")

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def supported(recipe: Recipe, config: PreTrainedConfig, layer: nn.Module) -> bool:
    """Whether the fast block knows all that such a layer is made of."""
    if recipe is not LLAMA or config.model_type not in _FAMILIES or config.hidden_act not in ("silu", "swish"):
        return False
    modules = dict(layer.named_modules())
    family = f"transformers.models.{config.model_type}.modeling_{config.model_type}"
    homes = (family, "transformers.activations", "torch.nn.modules.linear", "torch.nn.modules.activation")
    if any(type(module).__module__ not in homes for module in modules.values()):
        return False
    modules.pop("")
    norms = _NORMS + _HEAD_NORMS if config.model_type == "qwen3" else _NORMS
    if set(modules) != {*_QKV, *_GATE_UP, *_OUT, *norms, *_OTHERS}:
        return False
    linears = all(joinable([modules[name] for name in names]) for names in (_QKV, _GATE_UP, _OUT[:1], _OUT[1:]))
    return linears and all(hasattr(modules[name], "variance_epsilon") for name in norms)


def join_layer(layer: nn.Module) -> None:
    """Lay the weights of a layer as its block needs them; names and bytes stay."""
    for names in (_QKV, _GATE_UP):
        linears = [layer.get_submodule(name) for name in names]
        join_weights([linear for linear in linears if isinstance(linear, nn.Linear)])


class FastBlock:
    """Layer `index`, found at `path`, whose operators are `ops` by full module path; `join_layer` came first."""

    def __init__(
        self,
        index: int,
        path: str,
        layer: nn.Module,
        ops: Mapping[str, Op],
        slot: PassSlot,
        config: PreTrainedConfig,
        attention_shape: tuple[int, int, int],
    ) -> None:
        self._index = index
        self._slot = slot
        linears = {name: op for name in (*_QKV, *_GATE_UP, *_OUT) if isinstance(op := ops[f"{path}.{name}"], LinearOp)}
        self._qkv, self._gate_up = (LinearGroup([linears[n] for n in names], slot) for names in (_QKV, _GATE_UP))
        self._o, self._down = (linears[name] for name in _OUT)
        self._norms = [_Norm(ops[f"{path}.{name}"], layer.get_submodule(name)) for name in _NORMS]
        self._mlp = ops[f"{path}.{LLAMA.mlp}"]
        assert isinstance(self._mlp, MlpOp)
        self._mlp.run = self._feed_forward
        self._attention = layer.get_submodule("self_attn")
        self._scale = float(self._attention.scaling)  # type: ignore[arg-type]
        self._window = _window(config, self._attention)
        q_norm, k_norm = (
            _frozen(norm) if (norm := getattr(self._attention, n, None)) else None for n in ("q_norm", "k_norm")
        )
        self._shape = HeadShape(*attention_shape, q_norm, k_norm)

    @property
    def groups(self) -> tuple[LinearGroup, ...]:
        """The linears that run as one product."""
        return self._qkv, self._gate_up

    def forward(self, x_TD: Tensor, prelude: Prelude, current: Pass) -> Tensor:
        """[T, D] -> [T, D]; of the layer's arguments it takes the rotary tables."""
        cos_1TK, sin_1TK = prelude.calls[self._index][2]["position_embeddings"]
        before_attention, before_mlp = self._norms
        self._slot.current = current
        try:
            x_TD, h_TD = before_attention(x_TD, None, current)
            delta_TD = self._o(self._attend(h_TD, cos_1TK[0], sin_1TK[0]))
            x_TD, h_TD = before_mlp(x_TD, delta_TD, current)
            return self._mlp(h_TD).add_(x_TD)
        finally:
            self._slot.current = None

    def _attend(self, h_TD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        """[T, D] -> [T, H K]."""
        q_1HTK, k_1GTK, v_1GTK = heads(self._qkv(h_TD), cos_TK, sin_TK, self._shape)
        mixed_1THK, _ = packed_attention(
            self._attention, q_1HTK, k_1GTK, v_1GTK, None, scaling=self._scale, sliding_window=self._window
        )
        return mixed_1THK[0].flatten(1)

    def _feed_forward(self, h_TD: Tensor) -> Tensor:
        return self._down(swiglu(self._gate_up(h_TD)))


class _Norm:
    """The norm of a residual stream, with what is added to it first."""

    def __init__(self, op: Op, module: nn.Module) -> None:
        assert isinstance(op, NormOp)
        self._op = op
        self._norm = _frozen(module)
        op.run_with = self._with

    def _with(self, parameters: Mapping[str, Tensor], x_tD: Tensor) -> Tensor:
        return rms_norm(x_tD, parameters["weight"], self._norm.epsilon)

    def __call__(self, x_TD: Tensor, delta_TD: Tensor | None, current: Pass) -> tuple[Tensor, Tensor]:
        """(the stream, its norm)."""
        x_TD, h_TD = add_rms_norm(x_TD, delta_TD, self._norm)
        hook = current.hooks.get(self._op.name)
        return x_TD, hook(_Done(self._op, h_TD), x_TD) if hook is not None else h_TD


class _Done:
    """An operator as a hook sees it, whose output on the pass's rows is there already: what other rows' gradient goes
    through is then the same node, hooked or not."""

    def __init__(self, op: NormOp, y_TD: Tensor) -> None:
        self._op = op
        self._y_TD = y_TD

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def forward(self, x_TD: Tensor) -> Tensor:
        """That output."""
        return self._y_TD


def _frozen(norm: nn.Module) -> RmsNorm:
    weight = norm.weight
    assert isinstance(weight, Tensor)
    return RmsNorm(weight.detach(), float(norm.variance_epsilon))  # type: ignore[arg-type]


def _window(config: PreTrainedConfig, attention: nn.Module) -> int | None:
    """What the family's own code passes to its attention function."""
    if config.model_type == "llama":
        return None
    holder: Any = config if config.model_type == "mistral" else attention
    window: int | None = holder.sliding_window
    return window
