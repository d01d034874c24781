"""An adapter merged into its base: new values of the base's own parameters, written as an ordinary model folder.

The boundary: functions from old values to new ones, by parameter name; neither the engine nor peft. Weights are
streamed: one shard of the result (5 GB at most) is in memory at a time. Where the model ties its head to the embedding
and either changes, the result has both as matrices of their own and says so in its config. Nothing is matched by luck:
every change must find its tensor, some tensor must change, and before the folder appears its logits are compared with
those of base + adapter, both in fp32 - a merge that does not bring the base's outputs nearer to the adapter's is
refused. Costs a read and a write of the model, and the comparison (`merge_check`).

Legend: I input features, O output features.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from muxtune.durable import staged_folder, write_text
from muxtune.errors import AdapterError, ModelError
from muxtune.models.cache import RECEIPT
from muxtune.models.layout import INDEX, WEIGHTS, Layout, check_folder, read_json
from muxtune.models.merge_check import Adapted, compare_logits
from muxtune.models.skeleton import skeleton
from muxtune.models.sources import ModelFolder

# Full name of a parameter -> its new value from its old one, both fp32 at least; a linear's weight as [O, I].
Changes: TypeAlias = Mapping[str, Callable[[Tensor], Tensor]]

MAX_SHARD_BYTES = 5 * 10**9
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "I8": torch.int8, "BOOL": torch.bool}
_COPIED = (".json", ".jinja", ".txt", ".model")  # config, tokenizer, template, generation config


@dataclass(frozen=True, slots=True)
class MergeReport:
    """`difference`: the largest logit difference between the merged model and base + adapter; `effect`: between base
    and base + adapter, to judge it by. Both over a fixed prompt, in fp32; None where the check was left out.
    """

    folder: Path
    changed_tensors: int
    difference: float | None
    effect: float | None


@dataclass(frozen=True, slots=True)
class _Target:
    parameter: str
    transposed: bool  # a linear's weight that is kept [I, O]
    change: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Name of each tensor of the result -> that of the base's it is made from; what changes; whether a tied head
    becomes a matrix of its own."""

    sources: Mapping[str, str]
    targets: Mapping[str, _Target]
    unties: bool


def merge_into(
    base: ModelFolder,
    changes: Changes,
    dest: Path,
    *,
    adapted: Adapted | None,
    extra_files: Sequence[Path] = (),
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> MergeReport:
    """Write the base with `changes` as a model folder that transformers loads without peft.

    Args:
        adapted: the logits that the merged model's are compared with before the folder appears; None: they are not.
        extra_files: files that replace the base's own, such as the adapter's tokenizer and generation config.
        dtype: of the result's floating-point weights; None keeps each tensor's own.

    Raises:
        AdapterError: a change fits no parameter, or nothing changes.
        ModelError: `dest` exists, or the base folder cannot be read.
    """
    if dest.exists() and any(dest.iterdir() if dest.is_dir() else [dest]):
        raise ModelError("there is something already", where=str(dest), hint="choose a new folder for the merged model")
    layout = check_folder(base.path)
    plan = _plan(layout, changes)
    with staged_folder(dest, key_file="config.json") as staging:
        changed = _write_weights(layout, plan, staging, dtype, max_shard_bytes)
        _copy_files(layout.path, staging, extra_files, dtype, unties=plan.unties)
        difference, effect = compare_logits(adapted, staging) if adapted is not None else (None, None)
        report = MergeReport(dest, changed, difference, effect)
        write_text(staging / "README.md", _card(base, report))
    return report


def _plan(layout: Layout, changes: Changes) -> _Plan:
    model = skeleton(layout.path)
    modules, shapes = dict(model.named_modules()), {name: tuple(p.shape) for name, p in _parameters(model).items()}
    stored = {entry.name: entry.shape for entry in layout.tensors}
    sources = {name: name for name in stored}
    ends = _tied_ends(model)
    unties = bool(ends & changes.keys())
    if unties:
        sources |= _untied(ends, model.base_model_prefix, stored)
    targets = {}
    for name, change in changes.items():
        if name not in shapes:
            raise AdapterError("the base model has no such parameter", where=name)
        path, _, leaf = name.rpartition(".")
        key = _stored_name(name, model.base_model_prefix, sources)
        shape = stored[sources[key]]
        if shape != shapes[name]:
            raise AdapterError(f"the base's files hold it as {list(shape)}, not {list(shapes[name])}", where=name)
        targets[key] = _Target(name, isinstance(modules[path], Conv1D) and leaf == "weight", change)
    if not targets:
        raise AdapterError("the adapter has no tensors: there is nothing to merge")
    return _Plan(sources, targets, unties)


def _tied_ends(model: PreTrainedModel) -> set[str]:
    """The weights of embedding and head, by parameter name, where they are one."""
    if not model.config.get_text_config().tie_word_embeddings:
        return set()
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return {f"{name}.weight" for name, module in model.named_modules() if module in ends}


def _untied(ends: Collection[str], prefix: str, stored: Collection[str]) -> dict[str, str]:
    """Where each of two tied weights comes from: its own tensor, or the only one that there is. A checkpoint that holds
    both of a tied model's holds the same twice."""
    held = {name: key for name in sorted(ends) for key in _stored_names(name, prefix) if key in stored}
    if not held:
        raise AdapterError("the base's files hold neither embedding nor head", where=", ".join(sorted(ends)))
    (first, *_) = held.values()
    bare = all(not key.startswith(f"{prefix}.") for key in stored)  # a checkpoint of the inner model alone
    return {
        held.get(name) or (name.removeprefix(f"{prefix}.") if bare else name): held.get(name, first) for name in ends
    }


def _parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """By name; a shared one under each of its names."""
    return dict(model.named_parameters(remove_duplicate=False))


def _stored_names(name: str, prefix: str) -> tuple[str, str]:
    """A checkpoint may have been saved without the head's wrapper, and so without its prefix (GPT-2 on the hub is)."""
    return name, name.removeprefix(f"{prefix}.")


def _stored_name(name: str, prefix: str, stored: Collection[str]) -> str:
    for candidate in _stored_names(name, prefix):
        if candidate in stored:
            return candidate
    raise AdapterError(
        "the base's files hold no tensor of that name",
        where=name,
        hint="transformers renames or fuses this weight while it loads; such a base cannot be merged yet",
    )


def _write_weights(
    layout: Layout,
    plan: _Plan,
    staging: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> int:
    """Stream every tensor from the base's files into new shards; returns how many of them changed."""
    entries = {entry.name: entry for entry in layout.tensors}
    made = {name: entries[source] for name, source in plan.sources.items()}
    outline = {
        name: torch.empty(entry.shape, dtype=_result_dtype(entry.dtype, dtype), device="meta")
        for name, entry in made.items()
    }
    split = split_torch_state_dict_into_shards(
        outline,
        filename_pattern=WEIGHTS.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=max_shard_bytes,
    )
    changed = 0
    with ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in layout.weight_files}
        for shard, names in split.filename_to_tensors.items():
            tensors = {}
            for name in names:
                weight = opened[made[name].file].get_tensor(made[name].name)
                if name in plan.targets:
                    weight, moved = _merged(weight, plan.targets[name], outline[name].dtype)
                    changed += moved
                tensors[name] = weight.to(outline[name].dtype).contiguous()
            save_file(tensors, staging / shard, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_text(staging / INDEX, json.dumps(index, indent=2) + "\n")
    if changed == 0:
        raise AdapterError("the adapter changes no weight: it is as it started", hint="was it trained?")
    return changed


def _merged(weight: Tensor, target: _Target, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """The new value in `dtype`, computed in fp32 at least and rounded once; and whether it is another one."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    changed = target.change(wide.T).T if target.transposed else target.change(wide)
    assert changed.shape == weight.shape and changed.dtype == wide.dtype, target.parameter
    merged = changed.to(dtype)
    if not all(map(torch.isfinite, torch.aminmax(merged))):
        raise AdapterError(f"the merged weight does not fit into {dtype}", where=target.parameter)
    if not torch.equal(merged, weight.to(dtype)):
        return merged, True
    if not torch.equal(changed, wide):
        raise AdapterError(
            f"its change is lost when the weight is rounded to {dtype}",
            where=target.parameter,
            hint="merge in float32, or use the adapter unmerged",
        )
    return merged, False


def _result_dtype(stored: str, wanted: torch.dtype | None) -> torch.dtype:
    if stored not in _DTYPES:
        raise ModelError(f"weights of type {stored} cannot be merged into", hint="use an unquantised base")
    own = _DTYPES[stored]
    return wanted if wanted is not None and own.is_floating_point else own


def _copy_files(
    base: Path, staging: Path, extra_files: Sequence[Path], dtype: torch.dtype | None, *, unties: bool
) -> None:
    own = [file for file in sorted(base.iterdir()) if file.suffix in _COPIED and file.name not in (INDEX, RECEIPT)]
    for file in (*own, *extra_files):
        (staging / file.name).write_bytes(file.read_bytes())
    config = dict(read_json(staging / "config.json"))
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)
    if unties:
        config["tie_word_embeddings"] = False
        if isinstance(text := config.get("text_config"), dict):
            config["text_config"] = {**text, "tie_word_embeddings": False}
    if dtype is not None or unties:
        write_text(staging / "config.json", json.dumps(config, indent=2) + "\n")


def _card(base: ModelFolder, report: MergeReport) -> str:
    note = f" ({base.note})" if base.note else ""
    checked = ""
    if report.difference is not None and report.effect is not None:
        checked = (
            f"\nOn a fixed prompt the merged model's logits differ from base + adapter by at most "
            f"{report.difference:.3g}; the adapter moves them by up to {report.effect:.3g} (fp32).\n"
        )
    return f"""---
base_model: {json.dumps(base.public_name)}
pipeline_tag: text-generation
tags: [muxtune]
---

An adapter merged into its base with MuxTune: {report.changed_tensors} weights changed.

Base weights used: {json.dumps(base.public_name)}{note}, sha256 `{base.weights_sha256}`.
{checked}"""
