"""A LoRA merged into its base: W' = W + scale * B A, written as an ordinary model folder.

The boundary: plain pairs of matrices by module path; neither the engine nor peft. Weights are streamed: one shard of
the result (5 GB at most) is in memory at a time. Nothing is matched by luck: every pair must find its tensor, every
tensor it targets must change, and before the folder appears its logits are compared with those of base + adapter, both
in fp32 - a merge that does not bring the base's outputs nearer to the adapter's is refused. Costs a read and a write of
the model, and two forward passes of 32 tokens.

Legend: R rank, I input features, O output features.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from muxtune.durable import staged_folder
from muxtune.errors import AdapterError, ModelError
from muxtune.models.cache import RECEIPT
from muxtune.models.layout import INDEX, WEIGHTS, Layout, check_folder, read_json
from muxtune.models.merge_check import Pairs, compare_logits
from muxtune.models.skeleton import skeleton
from muxtune.models.sources import ModelFolder

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
    module: str
    transposed: bool  # the weight is kept [I, O]
    lora_a_RI: Tensor
    lora_b_OR: Tensor


def merge_into(
    base: ModelFolder,
    adapter: Pairs,
    dest: Path,
    *,
    scale: float,
    extra_files: Sequence[Path] = (),
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    verify: bool = True,
) -> MergeReport:
    """Write base + adapter as a model folder that transformers loads without peft.

    Args:
        scale: of the LoRA, alpha / r (or alpha / sqrt r).
        extra_files: files that replace the base's own, such as the adapter's tokenizer and generation config.
        dtype: of the result's floating-point weights; None keeps each tensor's own.
        verify: compare logits before the folder appears; loads the model twice, one after the other.

    Raises:
        AdapterError: a pair fits no weight, or is on a head that the model ties to its embedding, or changes nothing.
        ModelError: `dest` exists, or the base folder cannot be read.
    """
    if dest.exists() and any(dest.iterdir() if dest.is_dir() else [dest]):
        raise ModelError("there is something already", where=str(dest), hint="choose a new folder for the merged model")
    layout = check_folder(base.path)
    targets = _targets(layout, adapter)
    with staged_folder(dest, key_file="config.json") as staging:
        changed = _write_weights(layout, targets, staging, scale, dtype, max_shard_bytes)
        _copy_files(layout.path, staging, extra_files, dtype)
        difference, effect = compare_logits(layout.path, staging, adapter, scale) if verify else (None, None)
        report = MergeReport(dest, changed, difference, effect)
        (staging / "README.md").write_text(_card(base, report), encoding="utf-8")
    return report


def _targets(layout: Layout, adapter: Pairs) -> dict[str, _Target]:
    """Name of a stored tensor -> what is added to it."""
    model = skeleton(layout.path)
    modules = dict(model.named_modules())
    tied_head = model.get_output_embeddings() if model.config.get_text_config().tie_word_embeddings else None
    stored = {entry.name: entry.shape for entry in layout.tensors}
    targets = {}
    for name, (lora_a_RI, lora_b_OR) in adapter.items():
        module = modules.get(name)
        if not isinstance(module, nn.Linear | Conv1D):
            raise AdapterError("the base model has no linear layer of that name", where=name)
        if module is tied_head:
            raise AdapterError(
                "the head shares its matrix with the embedding, so a LoRA on it alone cannot be merged", where=name
            )
        key = _stored_name(f"{name}.weight", model.base_model_prefix, stored)
        transposed = isinstance(module, Conv1D)
        shape = (lora_b_OR.shape[0], lora_a_RI.shape[1])
        if stored[key] != (shape[::-1] if transposed else shape) or lora_a_RI.shape[0] != lora_b_OR.shape[1]:
            raise AdapterError(f"shape differs from the base weight's {list(stored[key])}", where=name)
        targets[key] = _Target(name, transposed, lora_a_RI, lora_b_OR)
    if not targets:
        raise AdapterError("the adapter has no tensors: there is nothing to merge")
    return targets


def _stored_name(name: str, prefix: str, stored: Mapping[str, tuple[int, ...]]) -> str:
    """A checkpoint may have been saved without the head's wrapper, and so without its prefix (GPT-2 on the hub is)."""
    for candidate in (name, name.removeprefix(f"{prefix}.")):
        if candidate in stored:
            return candidate
    raise AdapterError(
        "the base's files hold no tensor of that name",
        where=name,
        hint="transformers renames or fuses this weight while it loads; such a base cannot be merged yet",
    )


def _write_weights(
    layout: Layout,
    targets: Mapping[str, _Target],
    staging: Path,
    scale: float,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> int:
    """Stream every tensor from the base's files into new shards; returns how many of them changed."""
    files = {entry.name: entry.file for entry in layout.tensors}
    outline = {
        entry.name: torch.empty(entry.shape, dtype=_result_dtype(entry.dtype, dtype), device="meta")
        for entry in layout.tensors
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
                weight = opened[files[name]].get_tensor(name)
                if name in targets:
                    weight, moved = _merged(weight, targets[name], scale, outline[name].dtype)
                    changed += moved
                tensors[name] = weight.to(outline[name].dtype).contiguous()
            save_file(tensors, staging / shard, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (staging / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    if changed == 0:
        raise AdapterError("the adapter changes no weight: every lora_A or lora_B is zero", hint="was it trained?")
    return changed


def _merged(weight: Tensor, target: _Target, scale: float, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """W' in `dtype`, computed in fp32 at least and rounded once; and whether it is not W (as for a zero pair)."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    delta_OI = scale * (target.lora_b_OR.to(wide) @ target.lora_a_RI.to(wide))
    merged = (weight.to(wide) + (delta_OI.T if target.transposed else delta_OI)).to(dtype)
    if not all(map(torch.isfinite, torch.aminmax(merged))):
        raise AdapterError(f"the merged weight does not fit into {dtype}", where=target.module)
    if not torch.equal(merged, weight.to(dtype)):
        return merged, True
    if bool(delta_OI.any()):
        raise AdapterError(
            f"its change is lost when the weight is rounded to {dtype}",
            where=target.module,
            hint="merge in float32, or use the adapter unmerged",
        )
    return merged, False


def _result_dtype(stored: str, wanted: torch.dtype | None) -> torch.dtype:
    if stored not in _DTYPES:
        raise ModelError(f"weights of type {stored} cannot be merged into", hint="use an unquantised base")
    own = _DTYPES[stored]
    return wanted if wanted is not None and own.is_floating_point else own


def _copy_files(base: Path, staging: Path, extra_files: Sequence[Path], dtype: torch.dtype | None) -> None:
    own = [file for file in sorted(base.iterdir()) if file.suffix in _COPIED and file.name not in (INDEX, RECEIPT)]
    for file in (*own, *extra_files):
        (staging / file.name).write_bytes(file.read_bytes())
    if dtype is not None:
        config = {**read_json(staging / "config.json"), "dtype": str(dtype).removeprefix("torch.")}
        config.pop("torch_dtype", None)
        (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


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

A LoRA adapter merged into its base with MuxTune: {report.changed_tensors} weights changed.

Base weights used: {json.dumps(base.public_name)}{note}, sha256 `{base.weights_sha256}`.
{checked}"""
