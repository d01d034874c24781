"""From a checked model folder to a backbone that has proved it computes what the model computes."""

from __future__ import annotations

from typing import Literal

import torch

from muxtune.errors import ConfigError
from muxtune.models import attention
from muxtune.models.backbone import Backbone, BlockChoice
from muxtune.models.denormals import threads_flush
from muxtune.models.probe import check_support, model_logits
from muxtune.models.sources import ModelFolder
from muxtune.models.weights import load_model
from muxtune.parallel.layout import RankLayout
from muxtune.parallel.mesh import TensorAxis
from muxtune.parallel.pipe import make_mesh
from muxtune.parallel.stage import ShardedStage, StagedBackbone, load_stage
from muxtune.parallel.tensor import ShardedBackbone, load_sharded

HeldBackbone = ShardedBackbone | StagedBackbone | ShardedStage  # a part of a model; `whole` is all, without memory
DTypeName = Literal["auto", "fp32", "bf16", "fp64"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def load_backbone(
    folder: ModelFolder,
    *,
    device: str = "auto",
    dtype: DTypeName = "auto",
    num_hidden_layers: int | None = None,
    block: BlockChoice = "auto",
) -> Backbone:
    """Load, freeze and probe. `num_hidden_layers` keeps the first layers only, for fast checks; `block` is as for
    `Backbone`. On a CPU this begins the intra-op threads (`muxtune.models.denormals`).

    Raises ModelError where the model cannot be read or would be trained wrong, ConfigError where the device is not
    there.
    """
    place = choose_device(device)
    flushes = place.type == "cpu" and threads_flush()
    attention.register()
    model = load_model(
        folder,
        dtype=choose_dtype(dtype, place),
        device=place,
        attn_implementation="eager",
        num_hidden_layers=num_hidden_layers,
    )
    expected = model_logits(model, model.get_output_embeddings().weight.shape[0])
    backbone = Backbone(model, block)
    backbone.flushes = flushes
    check_support(backbone, expected)
    return backbone


def load_held(
    folder: ModelFolder,
    axis: TensorAxis,
    layout: RankLayout,
    *,
    dtype: torch.dtype,
    device: torch.device,
    layers: int | None,
    timeout_s: float,
) -> HeldBackbone:
    """What this rank, of all on `axis`, holds of a model that a layout splits; not probed. `timeout_s`: of what stages
    send each other. Raises as `load_sharded` and `load_stage`."""
    assert layout.size == axis.size, layout
    flushes = device.type == "cpu" and threads_flush()
    backbone: HeldBackbone
    if layout.pp == 1:
        backbone = load_sharded(folder.path, axis, dtype=dtype, device=device, num_hidden_layers=layers)
    else:
        mesh = make_mesh(axis, tp=layout.tp, pp=layout.pp, timeout_s=timeout_s, device=device)
        block: BlockChoice = "transformers"  # as where layers are split, so that a layout is no matter of the block
        backbone = load_stage(folder.path, mesh, dtype=dtype, device=device, num_hidden_layers=layers, block=block)
    backbone.flushes = flushes
    return backbone


def choose_device(name: str) -> torch.device:
    """`auto`: cuda if there, else cpu."""
    available = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if available else "cpu")
    if name.startswith("cuda") and not available:
        raise ConfigError("there is no CUDA device here", where="device", hint="device: cpu, or auto")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        there = ", ".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))
        raise ConfigError(f"there is no {name} here", where="device", hint=f"there are: {there}")
    return device


def device_of_rank(name: str, local: int, here: int) -> torch.device:
    """Of the `local`-th of the `here` ranks of a run on this machine: each has a GPU of its own, or all have the CPU.

    Raises ConfigError where there are fewer GPUs, and for one GPU by its number.
    """
    device = choose_device(name)
    if device.type == "cpu":
        return device
    if device.index is not None:
        raise ConfigError(
            f"{name} is one GPU, and {here} ranks on this machine take one each", where="device", hint="device: cuda"
        )
    if torch.cuda.device_count() < here:
        raise ConfigError(
            f"{here} ranks on this machine take a GPU each, and there are {torch.cuda.device_count()}",
            where="device",
            hint="fewer ranks, or device: cpu",
        )
    return torch.device("cuda", local)


def choose_dtype(name: DTypeName, device: torch.device) -> torch.dtype:
    """`auto`: bf16 on cuda, fp32 on cpu."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[name]
