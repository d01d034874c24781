"""BitFit (Ben Zaken et al., 2021): only biases are trained.

    y = BaseOp(x) + d        d [O] starts at zero

at every targeted linear and at every norm that has a bias. Where the operator has a bias b, training d from zero is
training b itself, since b + d is all that the model ever sees; where it has none, it gets one. The shared bias stays
as it is. (With weight decay it is d that decays: the task is drawn towards the backbone, not its biases to zero.)
Cost: one addition a number each way.

The folder is peft's BEFT (`MODULE.beft_bias`), which is just this on nn.Linear layers, whether they have a bias or not;
where a norm or a Conv1D (GPT-2) is among the points, which peft does not know, it is our MUXTUNE_BITFIT
(`MODULE.bitfit_bias`; docs/adr/0005).

Legend: t rows of one task, O output features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from muxtune.data.manifest import JsonValue
from muxtune.errors import AdapterError
from muxtune.peft.adapter_config import check_keys, clip, read_flag, targeted
from muxtune.peft.base import Adapter, BackboneView, BaseOp, Kept, PlainModule
from muxtune.peft.convert import PREFIX, PeftPayload, exported, target_modules
from muxtune.peft.dropout import RowKeys
from muxtune.peft.folder import CONFIG_FILE, read_config, read_tensors
from muxtune.peft.parameters import FlatParameters
from muxtune.peft.stored import Changes, StoredAdapter
from muxtune.peft.targets import linears, norms, select
from muxtune.spec.peft import BitFit

BEFT, OWN = "BEFT", "MUXTUNE_BITFIT"


class BiasModule(PlainModule):
    """What is added at one attach point."""

    by_hand = True

    def __init__(self, bias_O: Tensor) -> None:
        assert bias_O.grad is not None
        super().__init__(bias_O)
        self._bias_O, self._grad_O = bias_O.detach(), bias_O.grad

    def forward_rows(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Kept:
        """y += d; the backward needs nothing of it."""
        if y_tO.dtype == self._bias_O.dtype:
            y_tO += self._bias_O
        else:
            y_tO.copy_(y_tO + self._bias_O)
        return ()

    def backward_output(self, x_tI: Tensor, kept: Kept, grad_y_tO: Tensor, keys: RowKeys | None) -> Kept:
        self._grad_O.add_(grad_y_tO.sum(0, dtype=self._grad_O.dtype))
        return ()

    def backward_input(self, x_tI: Tensor, kept: Kept, grad_x_tI: Tensor, keys: RowKeys | None) -> None:
        """The BaseOp's is all there is."""

    def forward_plain(self, x_tI: Tensor, y_tO: Tensor, keys: RowKeys | None) -> Tensor:
        (bias_O,) = self.parameters
        return (y_tO + bias_O).to(y_tO.dtype)


class BitFitType:
    """See `muxtune.peft.registry.PeftType`."""

    def build(
        self, spec: BitFit, view: BackboneView, *, seed: int, dtype: torch.dtype, device: torch.device
    ) -> Adapter:
        """Zeros at the targeted linears and, if the spec says so, at the norms that have a bias."""
        chosen: dict[str, BaseOp] = dict(select(spec.target_modules, linears(view)))
        if spec.norm_biases:
            chosen |= _biased_norms(view)
        ops = [op for name, op in view.ops.items() if name in chosen]  # in the backbone's order
        parameters = FlatParameters({f"{op.name}.bias": (op.out_features,) for op in ops}, dtype, device)
        return Adapter({op.name: BiasModule(parameters.views[f"{op.name}.bias"]) for op in ops}, parameters)

    def payload(self, spec: BitFit, adapter: Adapter, view: BackboneView) -> PeftPayload:
        """peft's BEFT where peft can load it, else a format of our own."""
        own = linears(view)
        hooked = [name for name in adapter.modules if name in own]
        config: dict[str, JsonValue] = {
            "peft_type": BEFT if _known_to_peft(adapter.modules, view) else OWN,
            "task_type": "CAUSAL_LM",
            "target_modules": target_modules(hooked, view.module_names),
            "modules_to_save": None,
            "inference_mode": True,
            "revision": None,
        }
        if config["peft_type"] == OWN:
            config["norm_biases"] = len(hooked) < len(adapter.modules)
        biases = {
            name: exported(adapter.parameters.views[f"{name}.bias"], where=name, what="the bias")
            for name in sorted(adapter.modules)
        }
        if config["peft_type"] == BEFT:
            return PeftPayload(config, {_key(name, BEFT): bias_O[None] for name, bias_O in biases.items()})
        return PeftPayload(config, {_key(name, OWN): bias_O for name, bias_O in biases.items()})

    def read(self, folder: Path, view: BackboneView, *, base_sha256: str | None) -> StoredAdapter:
        """peft's BEFT, or our own format."""
        config, where, own = read_config(folder), str(folder / CONFIG_FILE), linears(view)
        form = BEFT if config.get("peft_type") == BEFT else OWN
        # Where no norm has a bias, "with those of the norms" says nothing more, and is the default.
        norm_biases = read_flag(config, "norm_biases", where) if form == OWN else not _biased_norms(view)
        harmless = ("init_weights",) if form == BEFT else ("norm_biases",)
        check_keys(config, peft_type=form, neutral={}, harmless=harmless, where=where)
        names = targeted(config, own, where=where)
        if not names:
            raise AdapterError(
                f"target_modules {clip(config.get('target_modules'))} name no linear layer of this model",
                where=where,
                hint=f"this one has {', '.join(sorted(own)[:3])}, ...",
            )
        widths = {name: own[name].out_features for name in names}
        if norm_biases:
            widths |= {name: op.out_features for name, op in _biased_norms(view).items()}
        layout = {_key(name, form): (1, width) if form == BEFT else (width,) for name, width in widths.items()}
        found = read_tensors(folder, config, layout, why_extra=_why_extra, base_sha256=base_sha256)
        values = {f"{name}.bias": found.tensors[_key(name, form)].flatten() for name in widths}
        spec = BitFit(target_modules=tuple(sorted(names)), norm_biases=norm_biases)
        return StoredAdapter(spec, values, found.base_name, found.manifest)

    def changes(self, stored: StoredAdapter, view: BackboneView) -> Changes:
        """b + d. Raises AdapterError where there is no b."""
        names = [key.removesuffix(".bias") for key in stored.values]
        bare = [name for name in names if not view.ops[name].biased]
        if bare:
            raise AdapterError(
                f"{len(bare)} of its {len(names)} biases are of modules that have none in the base model, the first is "
                f"{bare[0]!r}",
                hint="it cannot be merged; use it as an adapter",
            )
        return {key: partial(_plus, value) for key, value in stored.values.items()}


def _plus(bias_O: Tensor, old_O: Tensor) -> Tensor:
    return old_O + bias_O.to(old_O)


def _biased_norms(view: BackboneView) -> Mapping[str, BaseOp]:
    return {name: op for name, op in norms(view).items() if op.biased}


def _known_to_peft(points: Iterable[str], view: BackboneView) -> bool:
    """Whether every point is an nn.Linear, which is all that BEFT takes."""
    own = linears(view)
    return all(name in own and not own[name].transposed for name in points)


def _key(name: str, form: str) -> str:
    return f"{PREFIX}{name}.{'beft_bias' if form == BEFT else 'bitfit_bias'}"


def _why_extra(key: str) -> str:
    return "only the biases of what target_modules (and norm_biases) name are read"


BITFIT = BitFitType()
