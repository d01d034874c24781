"""Loading a rank's part of a model: only its slices of each weight file are read, so no rank ever holds the whole.

The module tree is built without memory; each of its parameters is then read in the ranges that the rank holds of its
BaseOp (`muxtune.parallel.shard`), and takes the place of the empty one. Those of other stages of a pipeline stay empty.
Row-parallel ranges of a matrix lie scattered in the file: safetensors maps it and copies the ranges alone. What the
folder lacks, or has but nothing uses, stops the load as it does on one device (`muxtune.models.weights`).

The boundary: files in, a module tree out whose linears are as wide as the rank's part. How it runs is the business of
`muxtune.parallel.tensor`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from muxtune.errors import ModelError
from muxtune.models.backbone import Backbone
from muxtune.models.layout import Layout
from muxtune.models.loading import reading
from muxtune.models.safetensors_file import TensorEntry
from muxtune.models.skeleton import skeleton_of
from muxtune.models.weights import check_complete, check_finite, training_config
from muxtune.parallel.shard import Cut, LayerSizes, Part, cut_of

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt2",
    "gemma2",
    "gemma3_text",
    "opt",
)  # of which every part is known to come out exact


@dataclass(frozen=True, slots=True)
class Slice:
    """`ranges` along dimension `dim` of a tensor."""

    dim: int
    ranges: tuple[range, ...]

    def of(self, whole: Tensor) -> Tensor:
        """That part of a tensor in memory, a copy."""
        return torch.cat([whole.narrow(self.dim, own.start, len(own)) for own in self.ranges], dim=self.dim)


def everything(name: str) -> bool:
    """Of a rank that holds a part of each module."""
    return True


def whole_of(layout: Layout, layers: int | None, *, split: bool = True) -> Backbone:
    """The model of a folder without memory for its weights. Raises ModelError where its operators are to be `split`
    and cannot be here."""
    config = training_config(layout, layers)
    if split and config.model_type not in FAMILIES:
        raise ModelError(
            f"model type {config.model_type!r} cannot be split over ranks yet",
            where=str(layout.path),
            hint="tp: 1, or a model of the types " + ", ".join(FAMILIES),
        )
    with reading("config.json", layout.path):
        return Backbone(skeleton_of(config), "transformers")


def sizes_of(whole: Backbone) -> LayerSizes:
    """What of a model decides how it is split."""
    recipe, (heads, groups, head_width) = whole.recipe, whole.attention_shape
    (units, *_) = (op.in_features for op in whole.attach_points.values() if "mlp_out" in op.roles)
    return LayerSizes(
        width=int(whole.config.hidden_size),
        heads=heads,
        groups=groups,
        head_width=head_width,
        units=units,
        vocabulary=whole.vocabulary,
        mlp_products=len(recipe.mlp_in) + len(recipe.mlp_out),
    )


def cuts_of(whole: Backbone, sizes: LayerSizes, part: Part) -> dict[str, Cut]:
    """What the rank holds of each BaseOp of which it does not hold all."""
    ops = [*whole.attach_points.values(), *whole.ends.values()]
    found = {op.name: cut_of(op.roles, sizes, part) for op in ops}
    return {name: cut for name, cut in found.items() if cut is not None}


def load_part(
    layout: Layout,
    whole: Backbone,
    cuts: Mapping[str, Cut],
    *,
    dtype: torch.dtype,
    device: torch.device,
    layers: int | None = None,
    held: Callable[[str], bool] = everything,
) -> PreTrainedModel:
    """The rank's part as a model of the family, frozen, without dropout. Parameters that are not `held`, by their full
    names, stay without memory; a tied weight is where one of its names is held. Raises ModelError as `load_model`."""
    model = skeleton_of(whole.config)
    entries = _by_parameter(model, layout)
    missing, mismatched, used = [], [], set()
    done: dict[int, nn.Parameter] = {}  # a tied weight is read once
    here = {id(empty) for name, _, _, empty in _parameters(model) if held(name)}
    for name, module, leaf, empty in _parameters(model):
        if id(empty) not in here:  # it is as wide as it is on the ranks that hold it
            own = _slice_of(name, module, leaf, cuts)
            if own is not None:
                module._parameters[leaf] = nn.Parameter(own.of(empty), requires_grad=False)
            used.add(name)
            continue
        if id(empty) not in done:
            entry = entries.get(name)
            if entry is None:
                missing.append(name)
                continue
            if entry.shape != tuple(empty.shape):
                mismatched.append(f"{name} {list(entry.shape)}")
                continue
            value = _read(entry, _slice_of(name, module, leaf, cuts)).to(device=device, dtype=dtype)
            done[id(empty)] = nn.Parameter(value, requires_grad=False)
        used.add(name)
        module._parameters[leaf] = done[id(empty)]
    unexpected = sorted(_unused(model, entries.keys() - used))
    info: dict[str, Iterable[str]] = {
        "missing_keys": missing,
        "mismatched_keys": mismatched,
        "unexpected_keys": unexpected,
    }
    check_complete(model, info, layout, cut=layers)
    _tell_widths(model, whole)
    _make_buffers(model, dtype, device, held)
    check_finite(model, layout)
    return model.eval()


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(full name, module, name in it, parameter), tied ones under each of their names."""
    for path, module in model.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is not None:
                yield f"{path}.{leaf}", module, leaf, parameter


def _by_parameter(model: PreTrainedModel, layout: Layout) -> dict[str, TensorEntry]:
    """The tensors of the folder by the names of the model: a checkpoint of a bare model lacks the prefix."""
    names = {f"{path}.{leaf}" for path, module in model.named_modules() for leaf in module._parameters}
    prefix = f"{model.base_model_prefix}."
    return {
        entry.name if entry.name in names or prefix + entry.name not in names else prefix + entry.name: entry
        for entry in layout.tensors
    }


def _unused(model: PreTrainedModel, names: Iterable[str]) -> Iterator[str]:
    """But for those that the family is known to leave behind, and the second name of a tied weight."""
    known = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    return (name for name in names if name not in tied and not any(re.search(one, name) for one in known))


def _slice_of(name: str, module: nn.Module, leaf: str, cuts: Mapping[str, Cut]) -> Slice | None:
    cut = cuts.get(name.rpartition(".")[0])
    if cut is None:
        return None
    if leaf == "bias":  # that of a row-parallel linear is added to the sum, by every rank
        return Slice(0, cut.ranges) if cut.side == "out" else None
    outputs = 1 if isinstance(module, Conv1D) else 0
    if isinstance(module, nn.Embedding):  # ids are its inputs, and come first
        outputs = 1
    return Slice(outputs if cut.side == "out" else 1 - outputs, cut.ranges)


def _read(entry: TensorEntry, part: Slice | None) -> Tensor:
    """A copy of the part, nothing else of the tensor."""
    with safe_open(entry.file, framework="pt") as file:
        if part is None:
            whole: Tensor = file.get_tensor(entry.name).clone()
            return whole
        tensor = file.get_slice(entry.name)
        before = (slice(None),) * part.dim
        pieces = [tensor[(*before, slice(own.start, own.stop))] for own in part.ranges]
    return torch.cat(pieces, dim=part.dim)


def _tell_widths(model: PreTrainedModel, whole: Backbone) -> None:
    """Let modules know how wide their weights are now, where they keep a note of it."""
    recipe, (heads, _, head_width) = whole.recipe, whole.attention_shape
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, Conv1D):
            module.nx, module.nf = module.weight.shape
            if recipe.q == recipe.k == recipe.v and name.endswith(recipe.q[0]):
                attention = model.get_submodule(name.rpartition(".")[0])
                attention.split_size = module.nf // 3
        if recipe.q and name.endswith(recipe.q[0]) and isinstance(module, nn.Linear):
            attention = model.get_submodule(name.rpartition(".")[0])
            if getattr(attention, "num_heads", None) == heads:  # OPT's, which parts rows by it
                attention.num_heads = module.out_features // head_width


def _make_buffers(
    model: PreTrainedModel, dtype: torch.dtype, device: torch.device, held: Callable[[str], bool]
) -> None:
    """What modules compute from the config when they are made, such as rotary frequencies: made anew, with memory."""
    for name, module in list(model.named_modules()):
        own = dict(module.named_buffers(recurse=False))
        if not any(buffer.is_meta and held(f"{name}.{leaf}") for leaf, buffer in own.items()):
            continue
        with torch.device(device):
            made = _scale_of(module, dtype) or dict(type(module)(model.config).named_buffers(recurse=False))
        assert made.keys() == own.keys(), f"{name} does not come from its config alone"
        for leaf, buffer in made.items():
            module.register_buffer(leaf, buffer, persistent=leaf not in module._non_persistent_buffers_set)


def _scale_of(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The one buffer that does not come from the config: the scale of Gemma's embedding, which also keeps it as a
    number. It is as precise as the model, as where transformers loads it."""
    scale = getattr(module, "scalar_embed_scale", None)
    return {"embed_scale": torch.tensor(scale, dtype=dtype)} if scale is not None else {}
