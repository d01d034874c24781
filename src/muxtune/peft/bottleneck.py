"""Bottleneck adapters: a network of two layers, few units wide, with a residual around it.

    h += s * (U f(D h + a) + b)          D [M, W], a [M], U [W, M], b [W]

*Serial*, after an operator (h is its output): after the projection that ends attention and after the one that ends the
feed-forward sublayer (Houlsby et al., 2019), or after the latter alone (Pfeiffer et al., 2020). *Parallel* (He et al.,
2021): the network reads what the feed-forward sublayer reads, and adds to what it gives,

    y = MLP(x) + s * (U f(D x + a) + b)

All before the sublayer's own residual addition. (Houlsby's and Pfeiffer's papers have BERT, where a norm follows that
addition; in a decoder whose norms come first, there is nothing else between operator and addition.) U, a and b start at
zero and D as nn.Linear does, so that training starts from the backbone itself. Arithmetic is in the adapter's own
precision. Cost: 12 M W operations a row and place, forward and backward, through autograd.

peft has no such type; the folder is our own MUXTUNE_BOTTLENECK (docs/adr/0005):
`MODULE.bottleneck_down.weight`, `.bias`, `MODULE.bottleneck_up.weight`, `.bias`, as of two nn.Linear.

Legend: t rows of one task, W width of the model, M units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from muxtune.data.manifest import JsonValue
from muxtune.errors import AdapterError, ConfigError
from muxtune.peft.adapter_config import check_keys
from muxtune.peft.base import Adapter, BackboneView, BaseOp, PlainModule
from muxtune.peft.convert import PREFIX, PeftPayload, exported
from muxtune.peft.dropout import RowKeys
from muxtune.peft.folder import CONFIG_FILE, read_config, read_tensors
from muxtune.peft.parameters import FlatParameters
from muxtune.peft.start import uniform
from muxtune.peft.stored import StoredAdapter
from muxtune.spec.peft import Bottleneck

OWN = "MUXTUNE_BOTTLENECK"
_SETTINGS = ("placement", "reduction_factor", "bottleneck_size", "non_linearity", "scaling")
_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


class BottleneckModule(PlainModule):
    """One network at one attach point. `parallel`: it reads the operator's input instead of its output."""

    def __init__(
        self, spec: Bottleneck, down_MW: Tensor, down_bias_M: Tensor, up_WM: Tensor, up_bias_W: Tensor
    ) -> None:
        super().__init__(down_MW, down_bias_M, up_WM, up_bias_W)
        self._parallel = spec.placement == "parallel"
        self._function = _FUNCTIONS[spec.non_linearity]
        self._scale = float(spec.scaling)

    def forward_plain(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        """The rows with the network's output added."""
        down_MW, down_bias_M, up_WM, up_bias_W = self.parameters
        h_tW = (x_tI if self._parallel else y_tO).to(down_MW.dtype)
        units_tM = self._function(F.linear(h_tW, down_MW, down_bias_M))
        return (y_tO + self._scale * F.linear(units_tM, up_WM, up_bias_W)).to(y_tO.dtype)


class BottleneckType:
    """See `muxtune.peft.registry.PeftType`."""

    def build(
        self, spec: Bottleneck, view: BackboneView, *, seed: int, dtype: torch.dtype, device: torch.device
    ) -> Adapter:
        """A network at every place that the spec's placement has in this model."""
        ops = _places(spec, view)
        shapes = {name: shape for op in ops.values() for name, shape in _shapes(spec, op).items()}
        parameters = FlatParameters(shapes, dtype, device)
        modules = {}
        for name, op in ops.items():
            own = [parameters.views[key] for key in _shapes(spec, op)]
            with torch.no_grad():
                own[0].copy_(uniform(seed, f"{name}/bottleneck_down", tuple(own[0].shape)))
            modules[name] = BottleneckModule(spec, *own)
        return Adapter(modules, parameters)

    def payload(self, spec: Bottleneck, adapter: Adapter, view: BackboneView) -> PeftPayload:
        """Our own format."""
        settings = spec.model_dump()
        config: dict[str, JsonValue] = {
            "peft_type": OWN,
            "task_type": "CAUSAL_LM",
            **{key: settings[key] for key in _SETTINGS},
            "inference_mode": True,
            "revision": None,
        }
        views = adapter.parameters.views
        tensors = {f"{PREFIX}{key}": exported(views[key], where=key, what="it") for key in sorted(views)}
        return PeftPayload(config, tensors)

    def read(self, folder: Path, view: BackboneView, *, base_sha256: str | None) -> StoredAdapter:
        """Our own format."""
        config, where = read_config(folder), str(folder / CONFIG_FILE)
        check_keys(config, peft_type=OWN, neutral={}, harmless=_SETTINGS, where=where)
        try:
            spec = Bottleneck(**{key: config[key] for key in _SETTINGS if key in config})
        except ConfigError as error:
            raise AdapterError(f"{error.where} {error.message}", where=where, hint=error.hint) from error
        shapes = {key: shape for op in _places(spec, view, where).values() for key, shape in _shapes(spec, op).items()}
        layout = {f"{PREFIX}{key}": shape for key, shape in shapes.items()}
        found = read_tensors(folder, config, layout, why_extra=_why_extra, base_sha256=base_sha256)
        values = {key: found.tensors[f"{PREFIX}{key}"] for key in shapes}
        return StoredAdapter(spec, values, found.base_name, found.manifest)


def _places(spec: Bottleneck, view: BackboneView, where: str = "peft.placement") -> dict[str, BaseOp]:
    """The attach points of the spec's placement. Raises AdapterError where the family lacks one."""
    present = {role for op in view.ops.values() for role in op.roles}
    if not present.issuperset(spec.roles):
        usable = [
            one for one in ("houlsby", "pfeiffer", "parallel") if present.issuperset(Bottleneck(placement=one).roles)
        ]
        raise AdapterError(
            f"placement {spec.placement} has no place in this base model, "
            "which has no such operator of its own, or is of a family whose parts are not known here",
            where=where,
            hint=f"possible here: {', '.join(usable)}" if usable else "choose another PEFT type",
        )
    return {name: op for name, op in view.ops.items() if not op.roles.isdisjoint(spec.roles)}


def _shapes(spec: Bottleneck, op: BaseOp) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one network's parameters, in the order that `BottleneckModule` takes them."""
    width = op.out_features
    size = spec.size(width)
    return {
        f"{op.name}.bottleneck_down.weight": (size, width),
        f"{op.name}.bottleneck_down.bias": (size,),
        f"{op.name}.bottleneck_up.weight": (width, size),
        f"{op.name}.bottleneck_up.bias": (width,),
    }


def _why_extra(key: str) -> str:
    return "only the matrices and biases of bottleneck_down and bottleneck_up at the places of its placement are read"


BOTTLENECK = BottleneckType()
