"""Which model the benchmarks run: the whole of it, its first layers in a folder of their own, or a tiny random one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from muxtune.models.loading import reading
from muxtune.models.sources import ModelFolder, resolve

MODEL = "smollm2-135m-instruct"
TINY_LAYERS = 2


@contextmanager
def model_folder(name: str, layers: int | None, *, vocabulary: int | None = None) -> Iterator[ModelFolder]:
    """The model, or a temporary folder that holds its first `layers` layers, and of its vocabulary the first entries
    where `vocabulary` says how many."""
    whole = resolve(name)
    if layers is None:
        yield whole
        return
    with tempfile.TemporaryDirectory() as cut:
        model = plain_model(whole, torch.float32, num_hidden_layers=layers)
        if vocabulary is not None:
            model.resize_token_embeddings(vocabulary)
        with reading("the cut model", Path(cut)):
            model.save_pretrained(cut)
        yield resolve(cut)


@contextmanager
def tiny_folder() -> Iterator[ModelFolder]:
    """Widths that are no powers of two, more heads than key/value heads, and positions for the longest example."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=208,
        num_hidden_layers=TINY_LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = LlamaForCausalLM(config)
        with reading("the tiny model", Path(folder)):
            model.save_pretrained(folder)
        yield resolve(folder)


def plain_model(folder: ModelFolder, dtype: torch.dtype, **config: int) -> PreTrainedModel:
    """transformers' own, loaded its own way."""
    with reading("the model", folder.path):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder.path, dtype=dtype, **config)
        return model
