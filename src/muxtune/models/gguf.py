"""A GGUF file becomes a folder in Hugging Face layout: float32 safetensors, config, tokenizer, template.

The boundary: one checked file in, one flat folder out; where the folder lies and that it is made once is the cache's
business. transformers reads the file (`gguf_file=`) and undoes llama.cpp's changes of names and layouts. It skips what
it does not know (a rope scaling, a tensor, a pre-tokenizer), which would train another model than the file's without a
word; so only what is known to be carried over passes (`check_convertible`), and the rest is refused by name. Two things
that transformers leaves out are put back: the step that splits numbers into digits (`smollm`) and the NFC normalizer
(`qwen2`). See docs/adr/0003.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, normalizers, pre_tokenizers

from muxtune.errors import ModelError
from muxtune.models.cache import Origin
from muxtune.models.gguf_header import GgufHeader
from muxtune.models.safetensors_file import hash_entries, read_entries

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

CONVERTER = 1  # part of the cache's key: raise it when the folder that comes out changes

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# What transformers carries into the config; everything else under the architecture's name changes the model.
_CARRIED = {"context_length", "block_count", "embedding_length", "feed_forward_length", "vocab_size"}
_CARRIED |= {"attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"}
_CARRIED |= {"attention.key_length", "attention.value_length", "rope.freq_base", "rope.dimension_count"}
_HEAD_WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_TENSOR = re.compile(
    r"(token_embd|output|output_norm"
    r"|blk\.\d+\.(attn_norm|attn_q|attn_k|attn_v|attn_output|attn_q_norm|attn_k_norm|ffn_norm|ffn_gate|ffn_up|ffn_down)"
    r")\.(weight|bias)"
)
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")


def check_convertible(header: GgufHeader) -> None:
    """Raises ModelError where something in the file would not reach the folder."""
    where, architecture = str(header.path), header.text("general.architecture")
    hint = "use the model's safetensors version"
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"GGUF of architecture {architecture!r} is not read, only {known}", where=where, hint=hint)
    keys = [key for key in (*header.metadata, *header.array_lengths) if key.startswith(f"{architecture}.")]
    for key in keys:
        if key.removeprefix(f"{architecture}.") not in _CARRIED:
            raise ModelError(f"the key {key} changes the model and would be lost", where=where, hint=hint)
    for tensor in header.tensors:
        if not _TENSOR.fullmatch(tensor.name):
            raise ModelError(f"the tensor {tensor.name} is not read and would be lost", where=where, hint=hint)
    vocabulary, split = header.text("tokenizer.ggml.model"), header.text("tokenizer.ggml.pre")
    if vocabulary != "gpt2" or split not in _PRE_TOKENIZERS:
        what = f"{vocabulary}/{split}" if split else vocabulary or "none"
        known = ", ".join(f"gpt2/{name}" for name in _PRE_TOKENIZERS)
        raise ModelError(f"its tokenizer ({what}) cannot be rebuilt, only {known}", where=where, hint=hint)


def convert(header: GgufHeader, dest: Path, public_name: str) -> Origin:
    """Write the folder of a file that `check_convertible` lets pass into the empty folder `dest`."""
    from muxtune.models.loading import reading

    with reading("the file", header.path):
        model, tokenizer = _load(header)
    _restore_tokenizer(tokenizer, header)
    _write_tokenizer(tokenizer, dest, model.config.max_position_embeddings)
    _write_config(model, header, dest)
    _write_generation_config(model, tokenizer, dest)
    _write_weights(model, dest / "model.safetensors")
    sha256 = hash_entries(read_entries(dest / "model.safetensors"))
    origin = Origin(public_name, _note(header), sha256)
    (dest / "README.md").write_text(_card(origin, header), encoding="utf-8")
    return origin


def _load(header: GgufHeader) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedTokenizerFast

    folder, name = str(header.path.parent), header.path.name
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        dtype=torch.float32,
        attn_implementation="eager",  # or transformers may look for a kernel on the network
        quantization_config=GgufConfig(gguf_file=name, dequantize=True),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are reported below, by name
        local_files_only=True,
        trust_remote_code=False,
    )
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if wrong:
        raise ModelError(f"its tensors do not fit the architecture: {wrong}", where=str(header.path))
    _check_head_width(model, header)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=name, local_files_only=True)
    return model, tokenizer


def _check_head_width(model: PreTrainedModel, header: GgufHeader) -> None:
    """transformers takes it from one key, or from the width of the model; all keys must say the same."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in _HEAD_WIDTHS:
        stated = header.metadata.get(f"{config.model_type}.{name}", width)
        if stated != width:
            raise ModelError(f"{name} is {stated}, but heads would be {width} wide", where=str(header.path))


def _digits_first(tokenizer: Tokenizer) -> None:
    """Every digit is a token of its own: numbers are split before the byte-level step looks for words."""
    steps = [pre_tokenizers.Digits(individual_digits=True), tokenizer.pre_tokenizer]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


def _compose_unicode(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()


def _as_it_is(tokenizer: Tokenizer) -> None:
    pass


# llama.cpp's name of a pre-tokenizer -> what transformers leaves out of it.
_PRE_TOKENIZERS: dict[str, Callable[[Tokenizer], None]] = {
    "smollm": _digits_first,
    "qwen2": _compose_unicode,
    "gpt-2": _as_it_is,
}


def _restore_tokenizer(tokenizer: PreTrainedTokenizerFast, header: GgufHeader) -> None:
    _PRE_TOKENIZERS[header.text("tokenizer.ggml.pre")](tokenizer.backend_tokenizer)


def _write_tokenizer(tokenizer: PreTrainedTokenizerFast, dest: Path, max_tokens: int) -> None:
    tokenizer.model_max_length = max_tokens
    tokenizer.save_pretrained(dest)
    path = dest / "tokenizer_config.json"
    config = json.loads(path.read_bytes())
    for key in ("is_local", "local_files_only", "backend", "name_or_path"):
        config.pop(key, None)
    # The name that both transformers 4 and 5 know; either loads tokenizer.json as it is, without rebuilding it.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["clean_up_tokenization_spaces"] = False
    _write_json(path, config)


def _write_config(model: PreTrainedModel, header: GgufHeader, dest: Path) -> None:
    config = json.loads(model.config.to_json_string(use_diff=True))
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    config["dtype"] = "float32"
    epsilon = header.metadata.get(f"{model.config.model_type}.attention.layer_norm_rms_epsilon")
    if epsilon is not None:
        config["rms_norm_eps"] = epsilon
    _write_json(dest / "config.json", config)


def _write_generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, dest: Path) -> None:
    """The ids that end a text: the file's own, and the end-of-turn token that the chat template writes."""
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = [special[token] for token in _END_OF_TURN if token in special and token in template]
    if tokenizer.eos_token_id is not None:
        ends = [tokenizer.eos_token_id, *(end for end in ends if end != tokenizer.eos_token_id)]
    if not ends:
        raise ModelError("neither an end-of-text nor an end-of-turn token is named", where=str(dest))
    generation = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    generation = {key: value for key, value in generation.items() if value is not None}
    _write_json(dest / "generation_config.json", generation | {"eos_token_id": ends[0] if len(ends) == 1 else ends})


def _write_weights(model: PreTrainedModel, path: Path) -> None:
    """`named_parameters` names a shared tensor once, so a head tied to the embedding is left out."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().contiguous() for name, tensor in model.named_parameters()}
    held = {tensor.data_ptr() for tensor in model.parameters()}
    assert all(tensor.data_ptr() in held for tensor in model.state_dict().values()), "a buffer would be lost"
    save_file(tensors, path, metadata={"format": "pt"})


def _note(header: GgufHeader) -> str:
    """The type that most of the weights' bytes were stored in."""
    bytes_of = Counter[str]()
    for tensor in header.tensors:
        bytes_of[tensor.type_name] += tensor.size_bytes
    name = bytes_of.most_common(1)[0][0]
    return f"from {name}" if name in ("F32", "F16", "BF16") else f"dequantised {name}"


def _card(origin: Origin, header: GgufHeader) -> str:
    licence = header.text("general.license")
    lines = ["---", f"license: {licence}", "---"] if licence else []
    lines += [f"# {origin.public_name}, {origin.note}", ""]
    lines += ["Float32 weights as MuxTune trains on them, converted from a GGUF file. They are not the weights of the"]
    lines += ["original checkpoint: adapters trained on them fit these best.", ""]
    lines += [f"SHA-256 of the weights: `{origin.weights_sha256}`", ""]
    return "\n".join(lines)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
