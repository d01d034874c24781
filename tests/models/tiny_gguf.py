"""Tiny GGUF files, written with the `gguf` package the way llama.cpp's converter does.

The model in the file is returned too, so that a conversion can be compared with what went in. The vocabulary is
3 special tokens, the 256 byte symbols and what some merges make, numbers among them: a tokenizer that fails to split
digits shows at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from tests.tiny_tokenizer import CHATML

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("1 2", "3 4", "12 34", "h e", "l l", "he ll", "hell o", "Ġ hello", "A Ì")
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
_SHAPE |= {"num_hidden_layers": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}


def tokens() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]


def tiny_gguf_model(arch: str, *, tied: bool = True) -> PreTrainedModel:
    shape = _SHAPE | {"vocab_size": len(tokens()), "tie_word_embeddings": tied}
    config = {
        "llama": lambda: LlamaConfig(**shape, head_dim=16, rope_parameters={"rope_theta": 5e4, "rope_type": "default"}),
        "qwen2": lambda: Qwen2Config(**shape),
        "qwen3": lambda: Qwen3Config(**shape, head_dim=128),
    }[arch]()
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.dim() == 1))
    return model.eval()


def write_tiny_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre: str = "smollm",
    eos: int = 2,
    keys: Mapping[str, float] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    leave_out: str = "",
) -> Path:
    """`keys` and `tensors` are added as they are, to make a file that has more than can be read."""
    writer = gguf.GGUFWriter(path, model.config.model_type)
    _write_shape(writer, model)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens())
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    writer.add_token_types([control if token in SPECIAL else normal for token in tokens()])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHATML)
    for key, value in (keys or {}).items():
        writer.add_float32(key, value)
    stored = {_gguf_name(name): array for name, array in _arrays(model).items()} | dict(tensors or {})
    for name, array in stored.items():
        if name == leave_out:
            continue
        if array.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_shape(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(width)


def _arrays(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """The model's tensors; llama.cpp interleaves the halves of each q and k head of a llama."""
    arrays = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    if model.config.model_type == "llama":
        heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
        for name, array in arrays.items():
            for projection, count in heads.items():
                if f".{projection}." in name:
                    halves = array.reshape(count, 2, -1, *array.shape[1:])
                    arrays[name] = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
    return arrays


def _gguf_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if module in whole:
        return f"{whole[module]}.{leaf}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.{leaf}"
