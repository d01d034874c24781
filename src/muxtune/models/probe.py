"""What a loaded backbone can be trusted with, found out by running it.

`check_support` refuses, at load, any model that this program would train silently wrong: our attention must be called
exactly once a layer, the chain of blocks must equal the untouched model on its own attention, and two packed
sequences must equal the two alone. (Bloom, whose position bias never reaches the attention interface, fails here.)

`rows_invariant` finds out whether a row of a shared GEMM has the same bits whatever rows stand beside it, on this
device, dtype and number of threads. Where it holds, a task trained with others equals the task alone bit for bit. It
also asks that rows begin at 64-byte boundaries, whichever row a task begins at: adapters and attention run on slices of
rows, and MKL's results vary with the alignment of what it is given (seen with widths of 39 and 35; never with 36).

Cost: a few passes over 40 tokens, and products of up to 2,048 rows a distinct weight shape (128 for the head, which
never sees more at once): about a second for 135M parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from muxtune.errors import ModelError
from muxtune.models.attach import Pass
from muxtune.models.attention import AttentionContext, Segment
from muxtune.models.backbone import Backbone
from muxtune.models.head_rows import ROW_MULTIPLE, SLICE_ROWS

_LENGTHS = (7, 17)
_PADDING = 8
_BATCHES = (48, 96, 256, 640, 2048)
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
ALIGNMENT_BYTES = 64


def model_logits(model: PreTrainedModel, vocabulary: int) -> list[Tensor]:
    """The untouched model's own logits on the probe's sequences, each alone, on its eager attention."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return [model(input_ids=ids[None], use_cache=False).logits[0] for ids in _sequences(model, vocabulary)]
    finally:
        model.set_attn_implementation(own)


def check_support(backbone: Backbone, expected: list[Tensor]) -> None:
    """Compare the composed backbone with `expected` (from `model_logits`); raises ModelError where they differ."""
    sequences = _sequences(backbone.model, backbone.vocabulary)
    packed, calls = _composed_logits(backbone, sequences)
    kind = backbone.config.model_type
    if sorted(calls.values()) != [1] * len(backbone.blocks):
        raise ModelError(
            f"model type {kind!r} cannot be trained here: its layers do not call the attention interface once each",
            hint="use a model whose attention goes through transformers' attention interface, such as Llama or Qwen",
        )
    for own, alone in zip(packed, sequences, strict=True):
        _require_close(own, _composed_logits(backbone, [alone])[0][0], f"{kind!r} mixes sequences that are packed")
    for own, reference in zip(packed, expected, strict=True):
        _require_close(own, reference, f"{kind!r} computes something that this program does not reproduce")


def _require_close(own: Tensor, reference: Tensor, what: str) -> None:
    scale = max(1.0, float(reference.abs().max()))
    gap = float((own - reference).abs().max()) / scale
    if not gap <= _TOLERANCE[reference.dtype if reference.dtype in _TOLERANCE else torch.float32]:
        raise ModelError(
            f"model type {what} (logits differ by {gap:.2g} of their size), so training it would be wrong",
            hint="this model cannot be used; see the supported families in the README",
        )


def _sequences(model: PreTrainedModel, vocabulary: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary, (length,), generator=generator).to(model.device) for length in _LENGTHS]


@torch.no_grad()
def _composed_logits(backbone: Backbone, sequences: list[Tensor]) -> tuple[list[Tensor], dict[int, int]]:
    lengths = [len(ids) for ids in sequences]
    spare = _PADDING + -(sum(lengths) + _PADDING) % ROW_MULTIPLE
    ids_T = torch.cat([*sequences, sequences[0].new_zeros(spare)])
    positions_T = torch.cat([torch.arange(n, device=ids_T.device) for n in [*lengths, spare]])
    context = AttentionContext([Segment(n) for n in [*lengths, spare]])
    hidden_TD = backbone.hidden(ids_T, positions_T, Pass(context))
    return list(backbone.head.logits(hidden_TD).split([*lengths, spare]))[:-1], context.calls


@torch.no_grad()
def rows_invariant(backbone: Backbone) -> bool:
    """Whether 16 rows give the same bits alone and inside larger batches, for every distinct frozen weight shape, and
    rows of every width are aligned. Linears that run as one product are asked as that product.

    MKL's usual mode, on a CPU with AVX-512, changes how it sums from 64, 192, 448 or 1,536 rows on, by shape.
    """
    here = [op for op in backbone.products.values() if not op.weight_OI.is_meta]  # of a stage, its own
    shapes = {op.weight_OI.shape: op.weight_OI for op in here}
    widths = {backbone.embedding.width, *(width for shape in shapes for width in shape)}
    widths |= {op.out_features for op in backbone.attach_points.values()}  # where columns of joined linears begin
    if any(width * backbone.dtype.itemsize % ALIGNMENT_BYTES for width in widths):
        return False
    head, of_head = backbone.head.weight_VD, [*(rows for rows in _BATCHES if rows < SLICE_ROWS), SLICE_ROWS]
    return all(_weight_invariant(weight, _BATCHES) for weight in shapes.values()) and (
        head.is_meta or _weight_invariant(head, of_head)
    )


def _weight_invariant(weight_OI: Tensor, batches: Sequence[int]) -> bool:
    generator = torch.Generator().manual_seed(0)
    for factor in (weight_OI.T, weight_OI):
        inner = factor.shape[0]
        rows = torch.randn(max(batches), inner, generator=generator).to(factor)
        alone = rows[:ROW_MULTIPLE] @ factor
        for total in batches:
            for start in (0, (total - ROW_MULTIPLE) // 2 | 1):
                batch = rows[:total].clone()
                batch[start : start + ROW_MULTIPLE] = rows[:ROW_MULTIPLE]
                if not torch.equal((batch @ factor)[start : start + ROW_MULTIPLE], alone):
                    return False
    return True
