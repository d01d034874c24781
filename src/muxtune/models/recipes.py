"""What a model family calls its parts: the roles from which attach points, cuts and (later) shards derive.

A recipe names module paths below the causal model. Families that are not listed get the recipe that `guess` derives
from the common names; either way the probe at load compares the composition with the model's own forward pass and
refuses what differs, so a wrong name can never train silently.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from muxtune.errors import ModelError


@dataclass(frozen=True, slots=True)
class Recipe:
    """Module paths: `body` holds the layers and everything before and after them; the others are below `body`.

    The role paths (q, k, v, o, mlp_in, mlp_out) are below a layer; a fused linear stands under each role it serves.
    """

    body: str
    layers: str = "layers"
    norm: str | None = "norm"
    project_out: str | None = None
    q: tuple[str, ...] = ("self_attn.q_proj",)
    k: tuple[str, ...] = ("self_attn.k_proj",)
    v: tuple[str, ...] = ("self_attn.v_proj",)
    o: tuple[str, ...] = ("self_attn.o_proj",)
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    mlp_out: tuple[str, ...] = ("mlp.down_proj",)
    mlp: str | None = "mlp"  # the feed-forward sublayer, where the family has it as one module

    def roles(self, name: str) -> frozenset[str]:
        """The roles of the linear at `name` below a layer."""
        by_role = {"q": self.q, "k": self.k, "v": self.v, "o": self.o, "mlp_in": self.mlp_in, "mlp_out": self.mlp_out}
        return frozenset(role for role, names in by_role.items() if name in names)


LLAMA = Recipe(body="model")
GPT2 = Recipe(
    body="transformer",
    layers="h",
    norm="ln_f",
    q=("attn.c_attn",),
    k=("attn.c_attn",),
    v=("attn.c_attn",),
    o=("attn.c_proj",),
    mlp_in=("mlp.c_fc",),
    mlp_out=("mlp.c_proj",),
)
OPT = Recipe(
    body="model.decoder",
    norm="final_layer_norm",
    project_out="project_out",
    o=("self_attn.out_proj",),
    mlp_in=("fc1",),
    mlp_out=("fc2",),
    mlp=None,
)

RECIPES: dict[str, Recipe] = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "mistral": LLAMA,
    "gemma2": LLAMA,
    "gemma3_text": LLAMA,
    "gpt2": GPT2,
    "opt": OPT,
}

_LAYER_NAMES = ("layers", "h", "blocks")
_NORM_NAMES = ("norm", "final_layer_norm", "final_layernorm", "ln_f", "norm_f")


def recipe_for(model: nn.Module, model_type: str) -> Recipe:
    """The family's recipe, or one guessed from common names (no roles: linear-level PEFT types only)."""
    return RECIPES.get(model_type) or guess(model, model_type)


def guess(model: nn.Module, model_type: str) -> Recipe:
    """Find the stack of decoder layers and the norm after it by name; raises ModelError where there is none."""
    for path, module in model.named_modules():
        for layers in _LAYER_NAMES:
            if isinstance(getattr(module, layers, None), nn.ModuleList):
                norm = next((name for name in _NORM_NAMES if hasattr(module, name)), None)
                nothing: tuple[str, ...] = ()
                return Recipe(path, layers, norm, None, nothing, nothing, nothing, nothing, nothing, nothing, None)
    raise ModelError(
        f"cannot find the decoder layers of model type {model_type!r}",
        hint="supported by name: " + ", ".join(sorted(RECIPES)),
    )
