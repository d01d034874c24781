"""Which model the benchmarks run: the whole of it, or its first layers in a folder of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from muxtune.models.loading import reading
from muxtune.models.sources import ModelFolder, resolve

MODEL = "smollm2-135m-instruct"


@contextmanager
def model_folder(name: str, layers: int | None) -> Iterator[ModelFolder]:
    """The model, or a temporary folder that holds its first `layers` layers."""
    whole = resolve(name)
    if layers is None:
        yield whole
        return
    with tempfile.TemporaryDirectory() as cut:
        model = plain_model(whole, torch.float32, num_hidden_layers=layers)
        with reading("the cut model", Path(cut)):
            model.save_pretrained(cut)
        yield resolve(cut)


def plain_model(folder: ModelFolder, dtype: torch.dtype, **config: int) -> PreTrainedModel:
    """transformers' own, loaded its own way."""
    with reading("the model", folder.path):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder.path, dtype=dtype, **config)
        return model
