"""How much memory training takes, told from `config.json` alone, before a weight is loaded.

    weights        every parameter once, in the backbone's dtype
    activations    what a packed row leaves behind in each layer until the backward pass
    head           the logits of one slice of trained positions (`muxtune.models.loss`)

Adapters come on top; their specs know them. A row leaves roughly the inputs and outputs of its layer's linears, times a
factor of the family, which stands for norms, activation functions and the backward pass's own buffers. The factors are
measured: what autograd keeps, by family, on tiny models (a test holds it), times 1.33, the ratio of the process's peak
memory to that on SmolLM2-135M: 1.66 MB a row, 14,200 floats a layer (docs/log.md). The fast block keeps a tenth less.
Soft-capped attention keeps its
scores as well, which grow with the sequence.

With recomputation (`muxtune.models.recompute`) a row leaves its input of each block, times the same 1.33, and that of
three layers for the one block that runs again and its backward pass: on SmolLM2-135M 257 kB a row, measured 176-238
(docs/log.md).

The boundary: bytes of shapes; who may train is the engine's business.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from muxtune.models import attention
from muxtune.models.backbone import Backbone, BlockChoice, BlockName
from muxtune.models.loss import SLICE_ROWS
from muxtune.models.skeleton import skeleton
from muxtune.spec.peft import Place

# Kept floats over the inputs and outputs of a layer's linears, by family: LLaMA's own, then the others by what autograd
# keeps of them. A family that is not listed counts as the most wasteful.
_FACTORS = {
    "llama": 1.4,
    "mistral": 1.4,
    "qwen2": 1.4,
    "opt": 1.4,
    "qwen3": 1.6,
    "gemma2": 1.9,
    "gemma3_text": 1.9,
    "gpt2": 2.5,
}
_OTHER = max(_FACTORS.values())
_FAST_FACTORS = {"llama": 1.25, "mistral": 1.25, "qwen2": 1.25, "qwen3": 1.42}  # where the fast block runs them
_SCORES = 2.5  # floats that soft-capped attention keeps of each score
_PEAK = 1.33  # the process's peak over what is kept
_BLOCKS_AT_ONCE = 3  # a block that runs again, and the buffers of its backward pass
_HEAD_COPIES = 3  # logits, their slope under a soft cap, and what becomes of them
_CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a model costs. `places`: every attach point.

    Attributes:
        row_bytes: activations of one packed row, all layers.
        score_bytes: of one row and one position of its sequence, where attention keeps scores; else 0.
        layer_weights, head_weights: numbers that every row, and every trained row, is multiplied with.
        position_bytes: keys and values of one position of a cut sequence, and their gradient, all layers.
        blocks, input_bytes: how many there are, and what one row is to all of them as their input.
        recompute: whether the activations are those of recomputation.
        block: what runs a layer.
    """

    weights_bytes: int
    row_bytes: int
    score_bytes: int
    head_bytes: int
    layer_weights: int
    head_weights: int
    places: tuple[Place, ...]
    position_bytes: int = 0
    blocks: int = 1
    input_bytes: int = 0
    recompute: bool = False
    block: BlockName = "transformers"

    def recomputed(self) -> Footprint:
        """The same model with recomputation."""
        return replace(
            self,
            row_bytes=int(_PEAK * self.input_bytes) + self._of_blocks(self.row_bytes),
            score_bytes=self._of_blocks(self.score_bytes),
            recompute=True,
        )

    def _of_blocks(self, size_bytes: int) -> int:
        """What the blocks that are at work at once hold of what all hold."""
        return size_bytes * min(self.blocks, _BLOCKS_AT_ONCE) // self.blocks

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) features of each linear of the layers."""
        return {place.name: (place.inputs, place.outputs) for place in self.places if place.kind == "linear"}

    def activation_bytes(self, rows: int, longest: int) -> int:
        """Of a micro-batch of `rows` whose longest sequence has `longest`."""
        return self.head_bytes + rows * (self.row_bytes + self.score_bytes * longest)

    def rows_within(self, free_bytes: int, longest: int) -> int:
        """Rows whose activations fit into `free_bytes`; may be zero or less."""
        return (free_bytes - self.head_bytes) // (self.row_bytes + self.score_bytes * longest)


def footprint(folder: Path, dtype: torch.dtype, block: BlockChoice = "auto") -> Footprint:
    """Of the model in a checked folder, run by `block`. Raises ModelError as `Backbone` does."""
    attention.register()
    backbone = Backbone(skeleton(folder), block)
    shapes = {name: (op.in_features, op.out_features) for name, op in backbone.attach_points.items()}
    factors = _FAST_FACTORS if backbone.block == "fast" else _FACTORS
    factor = factors.get(backbone.config.model_type, _OTHER)
    capped = getattr(backbone.config, "attn_logit_softcapping", None) is not None
    scores = _SCORES * backbone.config.num_attention_heads * len(backbone.blocks) if capped else 0
    return Footprint(
        weights_bytes=sum(parameter.numel() for parameter in backbone.model.parameters()) * dtype.itemsize,
        row_bytes=int(factor * sum(map(sum, shapes.values())) * dtype.itemsize),
        score_bytes=int(scores * dtype.itemsize),
        head_bytes=_HEAD_COPIES * SLICE_ROWS * backbone.vocabulary * torch.promote_types(dtype, torch.float32).itemsize,
        layer_weights=sum(inputs * outputs for inputs, outputs in shapes.values()),
        head_weights=backbone.head.weight_VD.numel(),
        places=backbone.places,
        position_bytes=_position_bytes(backbone, dtype),
        blocks=len(backbone.blocks),
        input_bytes=len(backbone.blocks) * backbone.config.hidden_size * dtype.itemsize,
        block=backbone.block,
    )


def _position_bytes(backbone: Backbone, dtype: torch.dtype) -> int:
    _, groups, width = backbone.attention_shape
    wide = torch.promote_types(dtype, torch.float32)
    return 2 * len(backbone.blocks) * groups * width * (dtype.itemsize + wide.itemsize)


def memory_here(device: torch.device) -> tuple[int, int]:
    """(bytes that this process has in use, bytes it could still get) on the device; cgroup limits count."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free, free
    free = psutil.virtual_memory().available
    for limit, usage in _CGROUP_LIMITS:
        allowed, used = _number(limit), _number(usage)
        if allowed is not None and used is not None:
            free = min(free, max(0, allowed - used))
    return psutil.Process().memory_info().rss, free


def _number(path: str) -> int | None:
    """The number in a kernel file; None where there is no such file, or no limit in it ("max")."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
