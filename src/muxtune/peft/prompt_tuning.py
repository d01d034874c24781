"""Prompt tuning (Lester et al., 2021): V learned embeddings before each of the task's sequences.

They are rows of the pass like those of tokens, in place of looked-up embeddings: positions, input projections and
every layer treat them alike, and the sequence's own positions go on from V, as in peft. Nothing is predicted from them
or for them. They start normal(0, 1), peft's RANDOM: a fresh prompt does change the function.

Cost: V more rows a sequence, through all layers, and a backward pass down to the first one.

Legend: V virtual rows, E embedding width.
"""

from __future__ import annotations

from pathlib import Path

import torch

from muxtune.peft.base import Adapter, BackboneView
from muxtune.peft.convert import PeftPayload
from muxtune.peft.parameters import FlatParameters
from muxtune.peft.prompt_format import TENSOR, Geometry, prompt_payload, read_prompt
from muxtune.peft.start import normal
from muxtune.peft.stored import StoredAdapter
from muxtune.spec.peft import PromptTuning

_PEFT_TYPE = "PROMPT_TUNING"


class PromptAdapter(Adapter):
    """`rows` virtual rows of an embedding of `width`."""

    def __init__(self, rows: int, width: int, *, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__({}, FlatParameters({TENSOR: (rows, width)}, dtype, device))
        self.load({TENSOR: normal(seed, TENSOR, (rows, width))})
        self.virtual_VE = self.parameters.views[TENSOR]


class PromptTuningType:
    """See `muxtune.peft.registry.PeftType`."""

    def build(
        self, spec: PromptTuning, view: BackboneView, *, seed: int, dtype: torch.dtype, device: torch.device
    ) -> PromptAdapter:
        """Rows as wide as the model's embedding."""
        width = _geometry(view).token_dim
        return PromptAdapter(spec.num_virtual_tokens, width, seed=seed, dtype=dtype, device=device)

    def payload(self, spec: PromptTuning, adapter: Adapter, view: BackboneView) -> PeftPayload:
        """peft's PROMPT_TUNING: [V, E]."""
        settings = {"prompt_tuning_init": spec.prompt_tuning_init}
        return prompt_payload(_PEFT_TYPE, adapter.parameters.views[TENSOR], _geometry(view), settings)

    def read(self, folder: Path, view: BackboneView, *, base_sha256: str | None) -> StoredAdapter:
        """peft's PROMPT_TUNING; what its rows started from, and with which tokenizer, does not matter any more."""
        harmless = {"prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs"}
        found = read_prompt(folder, _PEFT_TYPE, _geometry(view), harmless=harmless, base_sha256=base_sha256)
        spec = PromptTuning(num_virtual_tokens=found.tensors[TENSOR].shape[0])
        return StoredAdapter(spec, found.tensors, found.base_name, found.manifest)


def _geometry(view: BackboneView) -> Geometry:
    (embedding,) = (place for place in view.places if place.kind == "embedding")
    layers = {place.layer for place in view.places if place.layer is not None}
    return Geometry(embedding.outputs, view.attention_shape[0], len(layers), embedding.outputs)


PROMPT_TUNING = PromptTuningType()
