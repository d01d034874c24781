"""Prefix tuning (Li and Liang, 2021), without the reparametrising network (P-tuning v2, Liu et al., 2021).

In every layer, each query of the task's sequences sees P learned keys and values as if they came before the sequence:

    attention(q, [prefix_k, k], [prefix_v, v])

The sequence's own positions go on from P, and a sliding window counts the prefix as P positions, as in peft: a query
far into its sequence does not see the prefix there, and what lies a window before the sequence is never seen. Keys are
learned as attention sees them, after rotary positions. All start normal(0, 1), peft's own start: a fresh prefix does
change the function. The keys of a layer are one parameter and its values another; peft's one matrix is put together
from them.

Legend: P prefix positions, G key/value heads, K their width, L layers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from muxtune.errors import AdapterError
from muxtune.peft.base import Adapter, BackboneView
from muxtune.peft.convert import PeftPayload
from muxtune.peft.parameters import FlatParameters
from muxtune.peft.prompt_format import TENSOR, Geometry, prompt_payload, read_prompt
from muxtune.peft.start import normal
from muxtune.peft.stored import StoredAdapter
from muxtune.spec.peft import PrefixTuning
from muxtune.spec.peft.attention import widths

_PEFT_TYPE = "PREFIX_TUNING"
_PARTS = ("key", "value")


class LearnedPrefix:
    """See `muxtune.peft.base.Prefix`."""

    def __init__(self, parameters: FlatParameters, length: int, heads: int) -> None:
        self.length = length
        self._views = parameters.views
        self._heads = heads

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        key, value = (self._by_head(self._views[_name(layer, part)]) for part in _PARTS)
        return key, value

    def _by_head(self, rows_PX: Tensor) -> Tensor:
        return rows_PX.view(self.length, self._heads, -1).transpose(0, 1)[None]


class PrefixAdapter(Adapter):
    """Args: `heads` and `head_dim` are those of keys and values, in each of `layers` layers."""

    def __init__(
        self,
        layers: int,
        heads: int,
        head_dim: int,
        *,
        length: int,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (length, heads * head_dim)
        names = [_name(layer, part) for layer in range(layers) for part in _PARTS]
        super().__init__({}, FlatParameters(dict.fromkeys(names, shape), dtype, device))
        self.load({name: normal(seed, name, shape) for name in names})
        self.prefix = LearnedPrefix(self.parameters, length, heads)


class PrefixTuningType:
    """See `muxtune.peft.registry.PeftType`."""

    def build(
        self, spec: PrefixTuning, view: BackboneView, *, seed: int, dtype: torch.dtype, device: torch.device
    ) -> PrefixAdapter:
        """Raises AdapterError where the model's keys and values are not known, or differ from layer to layer."""
        _, heads, head_dim = view.attention_shape
        layers = widths(view.places, "k")
        if not layers or set(layers.values()) != {heads * head_dim} or sorted(layers) != list(range(len(layers))):
            raise AdapterError(
                "prefix tuning needs a model family whose attention is known here, the same in every layer",
                hint="use lora, or prompt_tuning",
            )
        return PrefixAdapter(
            len(layers), heads, head_dim, length=spec.num_virtual_tokens, seed=seed, dtype=dtype, device=device
        )

    def payload(self, spec: PrefixTuning, adapter: Adapter, view: BackboneView) -> PeftPayload:
        """peft's PREFIX_TUNING: [P, L * 2 * G * K], a layer's keys before its values."""
        prompt_PX = torch.cat([view.detach() for view in adapter.parameters.views.values()], dim=1)
        geometry = _geometry(view)
        settings = {"encoder_hidden_size": geometry.token_dim, "prefix_projection": False}
        return prompt_payload(_PEFT_TYPE, prompt_PX, geometry, settings)

    def read(self, folder: Path, view: BackboneView, *, base_sha256: str | None) -> StoredAdapter:
        """peft's PREFIX_TUNING; one that was trained with a projection holds what the projection came to."""
        geometry = _geometry(view)
        harmless = {"encoder_hidden_size", "prefix_projection", "init_weights"}
        found = read_prompt(folder, _PEFT_TYPE, geometry, harmless=harmless, base_sha256=base_sha256)
        prompt_PX = found.tensors[TENSOR]
        names = [_name(layer, part) for layer in range(geometry.num_layers) for part in _PARTS]
        values = dict(zip(names, prompt_PX.split(geometry.token_dim, dim=1), strict=True))
        spec = PrefixTuning(num_virtual_tokens=prompt_PX.shape[0])
        return StoredAdapter(spec, values, found.base_name, found.manifest)


def _geometry(view: BackboneView) -> Geometry:
    _, heads, head_dim = view.attention_shape
    layers = len(widths(view.places, "k"))
    return Geometry(heads * head_dim, heads, layers, layers * 2 * heads * head_dim)


def _name(layer: int, part: str) -> str:
    return f"layers.{layer}.prefix_{part}"


PREFIX_TUNING = PrefixTuningType()
