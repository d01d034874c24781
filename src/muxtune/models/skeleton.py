"""A model's module tree without memory for its weights: names and shapes of a model that nobody has loaded.

Costs the reading of `config.json` and the construction of the modules on the meta device, a fraction of a second.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from muxtune.models.loading import reading


def skeleton(folder: Path) -> PreTrainedModel:
    """The causal language model of a checked folder, all tensors on the meta device. Raises ModelError."""
    with reading("config.json", folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return skeleton_of(config)


def skeleton_of(config: PreTrainedConfig) -> PreTrainedModel:
    """The same, of a config. What transformers raises of a config that makes no sense is left as it is."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model
