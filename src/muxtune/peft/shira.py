"""SHiRA (Bhardwaj et al., 2024): y = x (W + S)^T, where S is zero but for a few places that are drawn once.

S [O, I] has r (I + O) trained numbers, as many as a LoRA of rank r, at places drawn without replacement from the job's
seed and the attach point's name. They start at zero. The places never change and belong to the adapter: they are its
`fixed` tensors, in row-major order.

    forward            y += S x           a sparse product, P multiply-adds a row
    input gradient     dx += S^T dy       the same
    gradient           (dy^T x)[places]   the dense product, of which P numbers are kept

A dense S would cost a copy of the backbone per task, so it never exists; the dense product of the gradient lives for
one attach point at a time. Measured (docs/log.md): at r = 8 the sparse products take a quarter of the dense ones' time,
at r = 32 half of it or more; gathering the gradient place by place takes two to three times as long as the dense
product.

The folder is peft's SHIRA: `MODULE.shira_weight` [P] and `MODULE.shira_indices` [2, P] (row, column of [O, I]). peft
itself adapts nn.Linear layers only; a folder of a GPT-2 says `fan_in_fan_out` and is for this program.

Legend: t rows of one task, I input features, O output features, P trained places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from muxtune.data.manifest import JsonValue
from muxtune.errors import AdapterError, ConfigError
from muxtune.peft.adapter_config import Neutral, check_keys, clip, read_flag, targeted
from muxtune.peft.base import Adapter, BackboneView, Kept, LinearBase, PlainModule
from muxtune.peft.convert import PREFIX, PeftPayload, exported, target_modules
from muxtune.peft.dropout import RowKeys
from muxtune.peft.folder import CONFIG_FILE, WEIGHTS_FILE, read_config, read_tensors
from muxtune.peft.parameters import FlatParameters
from muxtune.peft.start import distinct
from muxtune.peft.stored import Changes, StoredAdapter
from muxtune.peft.targets import linears, select
from muxtune.spec.peft import Shira

_PEFT_TYPE = "SHIRA"
WEIGHT, PLACES = "shira_weight", "shira_indices"
_NEUTRAL: Neutral = {"init_weights": ((None, True, False), "it says how the weights start")}
_HARMLESS = ("r", "mask_type", "random_seed", "fan_in_fan_out")


class ShiraModule(PlainModule):
    """The trained places of one weight."""

    by_hand = True

    def __init__(self, weight_P: Tensor, places_2P: Tensor, shape_OI: tuple[int, int]) -> None:
        assert weight_P.grad is not None
        super().__init__(weight_P)
        self._weight_P, self._grad_P = weight_P.detach(), weight_P.grad
        self._places_2P = places_2P
        self._shape_OI = shape_OI
        self._dtype = weight_P.dtype

    def forward_rows(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Kept:
        """y += S x; the backward needs the rows alone."""
        delta_Ot = torch.sparse.mm(self._sparse_OI(), x_tI.to(self._dtype).T.contiguous())
        if y_tO.dtype == self._dtype:
            y_tO += delta_Ot.T
        else:
            y_tO.copy_(y_tO + delta_Ot.T)
        return ()

    def backward_output(self, x_tI: Tensor, kept: Kept, grad_y_tO: Tensor, keys: RowKeys | None) -> Kept:
        """See the head of this file. The rows' gradient waits for the BaseOp's."""
        grad_y_tO = grad_y_tO.to(self._dtype)
        rows_P, columns_P = self._places_2P
        self._grad_P += torch.mm(grad_y_tO.T, x_tI.to(self._dtype))[rows_P, columns_P]
        return (grad_y_tO,)

    def backward_input(self, x_tI: Tensor, kept: Kept, grad_x_tI: Tensor, keys: RowKeys | None) -> None:
        (grad_y_tO,) = kept
        own_It = torch.sparse.mm(self._sparse_OI().t(), grad_y_tO.T.contiguous())
        grad_x_tI += own_It.T.to(grad_x_tI.dtype)

    def forward_plain(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        """With S as a dense matrix, which autograd then differentiates."""
        (weight_P,) = self.parameters
        rows_P, columns_P = self._places_2P
        dense_OI = weight_P.new_zeros(self._shape_OI).index_put((rows_P, columns_P), weight_P)
        return (y_tO + x_tI.to(self._dtype) @ dense_OI.T).to(y_tO.dtype)

    def _sparse_OI(self) -> Tensor:
        return torch.sparse_coo_tensor(
            self._places_2P, self._weight_P, self._shape_OI, is_coalesced=True, check_invariants=False
        )


def shira_adapter(
    ops: Iterable[LinearBase], places: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> Adapter:
    """Zeros at `places` [2, P] of each op, in row-major order."""
    ops = list(ops)
    fixed = {f"{op.name}.{PLACES}": places[op.name] for op in ops}
    parameters = FlatParameters({f"{op.name}.{WEIGHT}": (places[op.name].shape[1],) for op in ops}, dtype, device)
    modules = {
        op.name: ShiraModule(
            parameters.views[f"{op.name}.{WEIGHT}"], places[op.name], (op.out_features, op.in_features)
        )
        for op in ops
    }
    return Adapter(modules, parameters, fixed=fixed)


class ShiraType:
    """See `muxtune.peft.registry.PeftType`."""

    def build(self, spec: Shira, view: BackboneView, *, seed: int, dtype: torch.dtype, device: torch.device) -> Adapter:
        """Zeros at random places of the targeted linears."""
        ops = list(select(spec.target_modules, linears(view)).values())
        return shira_adapter(ops, {op.name: _draw(spec, op, seed).to(device) for op in ops}, dtype, device)

    def payload(self, spec: Shira, adapter: Adapter, view: BackboneView) -> PeftPayload:
        """peft's SHIRA."""
        tensors: dict[str, Tensor] = {}
        for name in sorted(adapter.modules):
            weight_P = adapter.parameters.views[f"{name}.{WEIGHT}"]
            tensors[_key(name, WEIGHT)] = exported(weight_P, where=name, what=WEIGHT)
            tensors[_key(name, PLACES)] = adapter.fixed[f"{name}.{PLACES}"].to("cpu", torch.int32)
        config: dict[str, JsonValue] = {
            "peft_type": _PEFT_TYPE,
            "task_type": "CAUSAL_LM",
            "r": spec.r,
            "mask_type": "random",
            "random_seed": None,
            "target_modules": target_modules(adapter.modules, view.module_names),
            "fan_in_fan_out": any(linears(view)[name].transposed for name in adapter.modules),
            "modules_to_save": None,
            "inference_mode": True,
            "revision": None,
        }
        return PeftPayload(config, tensors)

    def read(self, folder: Path, view: BackboneView, *, base_sha256: str | None) -> StoredAdapter:
        """peft's SHIRA, whatever drew its places: they are in the file."""
        config, where, own = read_config(folder), str(folder / CONFIG_FILE), linears(view)
        check_keys(config, peft_type=_PEFT_TYPE, neutral=_NEUTRAL, harmless=_HARMLESS, where=where)
        read_flag(config, "fan_in_fan_out", where)
        names = targeted(config, own, where=where)
        if not names:
            raise AdapterError(
                f"target_modules {clip(config.get('target_modules'))} name no linear layer of this model",
                where=where,
                hint=f"this one has {', '.join(sorted(own)[:3])}, ...",
            )
        spec = Shira(r=_rank(config.get("r", 32), where), target_modules=tuple(sorted(names)))
        layout = _layout(spec, [own[name] for name in names], where)
        integers = {_key(name, PLACES) for name in names}
        found = read_tensors(folder, config, layout, why_extra=_why_extra, base_sha256=base_sha256, integers=integers)
        values: dict[str, Tensor] = {}
        for name in names:
            op, places_2P = own[name], found.tensors[_key(name, PLACES)]
            order_P = _order(places_2P, (op.out_features, op.in_features), f"{folder / WEIGHTS_FILE}: {name}")
            values[f"{name}.{PLACES}"] = places_2P[:, order_P]
            values[f"{name}.{WEIGHT}"] = found.tensors[_key(name, WEIGHT)][order_P]
        return StoredAdapter(spec, values, found.base_name, found.manifest)

    def changes(self, stored: StoredAdapter, view: BackboneView) -> Changes:
        """W + S."""
        names = [key.removesuffix(f".{WEIGHT}") for key in stored.values if key.endswith(f".{WEIGHT}")]
        return {
            f"{name}.weight": partial(_plus, stored.values[f"{name}.{WEIGHT}"], stored.values[f"{name}.{PLACES}"])
            for name in names
        }


def _plus(weight_P: Tensor, places_2P: Tensor, old_OI: Tensor) -> Tensor:
    rows_P, columns_P = places_2P
    return old_OI.index_put((rows_P, columns_P), weight_P.to(old_OI), accumulate=True)


def _draw(spec: Shira, op: LinearBase, seed: int) -> Tensor:
    """Row and column of each trained place, [2, P] in row-major order."""
    count = spec.places_of(op.name, op.in_features, op.out_features)
    flat_P = distinct(seed, f"{op.name}/{PLACES}", count, op.out_features * op.in_features)
    return torch.stack([flat_P // op.in_features, flat_P % op.in_features])


def _order(places_2P: Tensor, shape_OI: tuple[int, int], where: str) -> Tensor:
    """The permutation that puts a stranger's places into row-major order.

    Raises AdapterError where one lies outside the weight, or twice in the file: it would be read and written out of
    bounds, or count double.
    """
    limit_21 = torch.tensor(shape_OI)[:, None]
    if bool((places_2P < 0).any()) or bool((places_2P >= limit_21).any()):
        raise AdapterError(f"places outside a weight of {list(shape_OI)}", where=where, hint="it is of another model")
    flat_P, order_P = (places_2P[0] * shape_OI[1] + places_2P[1]).sort()
    if bool((flat_P[1:] == flat_P[:-1]).any()):
        raise AdapterError("the same place twice", where=where, hint="save the adapter again")
    return order_P


def _layout(spec: Shira, ops: Iterable[LinearBase], where: str) -> dict[str, tuple[int, ...]]:
    layout: dict[str, tuple[int, ...]] = {}
    for op in ops:
        try:
            count = spec.places_of(op.name, op.in_features, op.out_features)
        except ConfigError as error:
            raise AdapterError(error.message, where=where, hint=error.hint) from error
        layout[_key(op.name, WEIGHT)] = (count,)
        layout[_key(op.name, PLACES)] = (2, count)
    return layout


def _rank(value: JsonValue, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 65536:
        raise AdapterError(f"r must be an integer from 1 to 65536, not {clip(value)}", where=where)
    return value


def _key(name: str, tensor: str) -> str:
    return f"{PREFIX}{name}.{tensor}"


def _why_extra(key: str) -> str:
    return "only base_model.model.MODULE.shira_weight and shira_indices of the targeted linears are read"


SHIRA = ShiraType()
