"""What the tests of exported folders ask of them: the model in a folder, and the logits of one."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.peft.adapters import some_ids


def logits(model: PreTrainedModel | PeftModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(some_ids()).logits
    return found


def load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()
