"""Tiny random models of every supported family, and folders that hold them in Hugging Face layout.

The sizes are chosen to make faults visible: heads times head width differs from the model width, key/value heads are
fewer than query heads, windows are shorter than some sequences, families with dropout keep it on in their config (who
trains them must turn it off), and biases and norms are random instead of zeros and ones. Weights are drawn in fp32
from the seed alone and cast afterwards, so the fp64 model is exactly the fp32 one. All widths are multiples of 16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.pytorch_utils import Conv1D

from tests.tiny_tokenizer import END_OF_TEXT_ID, END_OF_TURN_ID, VOCAB, tiny_tokenizer

WINDOW = 12  # sliding window, tokens
POSITIONS = 256  # longest sequence

SUPPORTED = (
    "llama",
    "llama-tied",
    "llama-mqa",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gpt2",
    "opt",
    "opt-350m",
)
REFUSED = ("bloom",)
ARCHITECTURES = SUPPORTED + REFUSED


def tiny_model(
    arch: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    attention: str | None = None,
) -> PreTrainedModel:
    """A random model of the family, in eval mode, the same for the same seed in every dtype.

    `attention` is transformers' attention implementation: sdpa, or eager where the family's soft-caps need it.
    """
    config = tiny_config(arch, layers=layers)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention or attention_of(arch))
    _draw_weights(model, seed)
    # Parameters only: transformers keeps rotary frequencies in fp32 at every dtype, `.to(dtype)` would round them.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.generation_config.eos_token_id = [END_OF_TURN_ID, END_OF_TEXT_ID]
    model.generation_config.pad_token_id = END_OF_TEXT_ID
    return model.eval()


def tiny_folder(folder: Path, arch: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, layers: int = 2) -> Path:
    """Write a tiny model with tokenizer, ChatML template and generation config to `folder`; returns `folder`."""
    tiny_model(arch, seed=seed, dtype=dtype, layers=layers).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def attention_of(arch: str) -> str:
    """transformers' sdpa refuses soft-capped scores, which Gemma-2 needs; Bloom has no sdpa."""
    return "eager" if arch in ("gemma2", "bloom") else "sdpa"


def tiny_config(arch: str, *, layers: int = 2) -> PreTrainedConfig:
    """The config of one of ARCHITECTURES."""
    if arch not in _CONFIGS:
        raise KeyError(f"no tiny architecture {arch!r}; there are {', '.join(_CONFIGS)}")
    config = _CONFIGS[arch](layers)
    config.bos_token_id = END_OF_TEXT_ID
    config.eos_token_id = END_OF_TURN_ID
    config.pad_token_id = END_OF_TEXT_ID
    return config


# Llama and its kin: 4 heads of 16 on a width of 48, two key/value heads.
_LLAMA_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": POSITIONS,
}
_GEMMA_SHAPE = _LLAMA_SHAPE | {
    "query_pre_attn_scalar": 24,  # differs from head_dim, so a wrong scale shows
    "sliding_window": WINDOW,
}
_OPT_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "word_embed_proj_dim": 48,
    "ffn_dim": 80,
    "num_attention_heads": 3,
    "max_position_embeddings": POSITIONS,
    "layerdrop": 0.1,
}


def _llama(layers: int, **changes: Any) -> LlamaConfig:
    return LlamaConfig(**(_LLAMA_SHAPE | {"num_hidden_layers": layers, "tie_word_embeddings": False} | changes))


def _qwen2(layers: int) -> Qwen2Config:
    shape = _LLAMA_SHAPE | {"hidden_size": 64}  # its heads are always as wide together as the model
    del shape["head_dim"]
    return Qwen2Config(**shape, num_hidden_layers=layers, tie_word_embeddings=True)


def _qwen3(layers: int) -> Qwen3Config:
    return Qwen3Config(**_LLAMA_SHAPE, num_hidden_layers=layers, tie_word_embeddings=False)


def _mistral(layers: int) -> MistralConfig:
    return MistralConfig(**_LLAMA_SHAPE, num_hidden_layers=layers, sliding_window=WINDOW, tie_word_embeddings=False)


def _gemma2(layers: int) -> Gemma2Config:
    return Gemma2Config(
        **_GEMMA_SHAPE,
        num_hidden_layers=layers,
        layer_types=_alternating(layers),
        # Far below Gemma's 50 and 30: tiny scores would never reach those caps.
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    )


def _gemma3(layers: int, groups: int = 1) -> Gemma3TextConfig:
    shape = _GEMMA_SHAPE | {"num_key_value_heads": groups}
    return Gemma3TextConfig(**shape, num_hidden_layers=layers, layer_types=_alternating(layers))


def _gpt2(layers: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=VOCAB,
        n_positions=POSITIONS,
        n_embd=48,
        n_layer=layers,
        n_head=3,
        scale_attn_by_inverse_layer_idx=True,
    )


def _opt(layers: int, **changes: Any) -> OPTConfig:
    return OPTConfig(**(_OPT_SHAPE | {"num_hidden_layers": layers} | changes))


def _bloom(layers: int) -> BloomConfig:
    return BloomConfig(vocab_size=VOCAB, hidden_size=48, n_layer=layers, n_head=3)


def _alternating(layers: int) -> list[str]:
    return ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)]


_CONFIGS: dict[str, Callable[[int], PreTrainedConfig]] = {
    "llama": _llama,
    "llama-tied": lambda layers: _llama(layers, tie_word_embeddings=True),
    "llama-mqa": lambda layers: _llama(layers, hidden_size=64, num_key_value_heads=1),
    # Heads as SmolLM2 has them, tied: two ranks cannot have as many each.
    "llama-uneven": lambda layers: _llama(
        layers,
        hidden_size=144,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=128,
        tie_word_embeddings=True,
    ),
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3-two": lambda layers: _gemma3(layers, groups=2),
    "gpt2": _gpt2,
    "opt": _opt,
    # OPT-350M: embeddings of another width, projected in and out, and norms after the blocks.
    "opt-350m": lambda layers: _opt(layers, word_embed_proj_dim=32, do_layer_norm_before=False),
    "bloom": _bloom,
}


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Scores, hidden values and logits of spread about one, so that attention and losses depend on everything."""
    generator = torch.Generator().manual_seed(seed)
    fan_in_first = {module.weight for module in model.modules() if isinstance(module, Conv1D)}
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for parameter in model.parameters():  # a tied weight comes once
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:  # biases and norms: around what the family starts from, be it zero or one
            parameter.add_(0.1 * noise)
        elif parameter in embeddings:
            parameter.copy_(0.3 * noise)
        else:
            fan_in = parameter.shape[0 if parameter in fan_in_first else 1]
            parameter.copy_(noise / math.sqrt(fan_in))
