"""Adapters of known values on tiny models, their plain arithmetic, and folders that hold them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from muxtune.data.manifest import BaseIdentity, DatasetRecord, PromptFormat, TrainingManifest
from muxtune.peft.folder import write_adapter
from muxtune.peft.lora_config import LoraFormat
from muxtune.peft.lora_convert import export_lora
from tests.tiny_tokenizer import END_OF_TURN_ID

Pairs = dict[str, tuple[Tensor, Tensor]]

MANIFEST = TrainingManifest(
    base=BaseIdentity("tests/tiny", "ab" * 32, "dequantised Q4_1"),
    prompt=PromptFormat("messages", "Answer in SQL.", (END_OF_TURN_ID,)),
    job={"name": "sql", "max_steps": 24, "peft": {"type": "lora", "r": 4}},
    datasets=(DatasetRecord("sql.jsonl", "cd" * 32, 20),),
    seed=7,
    steps=24,
)


def linear_sizes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Module path -> (in, out) of each linear inside the layers: what the backbone calls its attach points."""
    sizes = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            sizes[name] = (module.in_features, module.out_features)
        elif isinstance(module, Conv1D):
            sizes[name] = (module.nx, module.nf)
    return sizes


def module_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name]


def random_pairs(sizes: dict[str, tuple[int, int]], targets: Iterable[str], r: int = 4, seed: int = 1) -> Pairs:
    """A [r, in] and B [out, r], both non-zero, for each module whose path ends in one of `targets`."""
    generator = torch.Generator().manual_seed(seed)
    ends = tuple(targets)
    return {
        name: (
            0.3 * torch.randn(r, inputs, generator=generator),
            0.3 * torch.randn(outputs, r, generator=generator),
        )
        for name, (inputs, outputs) in sizes.items()
        if name.endswith(ends)
    }


def adapted_logits(model: PreTrainedModel, pairs: Pairs, scale: float, ids: Tensor) -> Tensor:
    """Logits of base + scale * x A^T B^T, by hooks, in the model's own dtype: neither peft nor our engine."""
    handles = []
    for name, pair in pairs.items():
        lora_a_RI, lora_b_OR = (tensor.to(model.dtype) for tensor in pair)

        def add(_: nn.Module, inputs: tuple[Tensor], y: Tensor, a: Tensor = lora_a_RI, b: Tensor = lora_b_OR) -> Tensor:
            return y + scale * (inputs[0] @ a.T @ b.T)

        handles.append(model.get_submodule(name).register_forward_hook(add))
    with torch.no_grad():
        logits: Tensor = model(ids).logits
    for handle in handles:
        handle.remove()
    return logits


def write_lora(
    dest: Path, model: PreTrainedModel, pairs: Pairs, form: LoraFormat, model_folder: Path | None = None
) -> Path:
    write_adapter(dest, export_lora(pairs, form, module_names=module_names(model)), MANIFEST, model_folder=model_folder)
    return dest


def some_ids(seed: int = 3, length: int = 11) -> Tensor:
    return torch.randint(3, 320, (2, length), generator=torch.Generator().manual_seed(seed))
