"""Small real tokenizers in Hugging Face layout, and chat templates in the formats of well-known model families."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_CORPUS = (
    "system user assistant model tool think You are a helpful assistant named Probe.",
    "The quick brown fox jumps over the lazy dog. How many users are there? SELECT COUNT(*) FROM users;",
    "INST SYS USER: ASSISTANT: answer question weather in Paris is sunny, 21 degrees; see https://example.org/a?b=c",
)


@dataclass(frozen=True)
class Family:
    """A template, and the tokenizer that goes with it. `trained` is what one answer B trains."""

    template: str
    special: tuple[str, ...]
    bos: str
    eos: str
    trained: str = ""
    kind: str = "bytes"
    added: tuple[str, ...] = ()  # added tokens that are not special
    rstrip: bool = False
    adds_bos: bool = False
    config: dict[str, object] = field(default_factory=dict)


def template(name: str) -> str:
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def _bars(name: str) -> str:
    """DeepSeek's tokens are written with a full-width bar and a low line of their own."""
    return name.replace("|", "\N{FULLWIDTH VERTICAL LINE}").replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")


_BEGIN, _END = _bars("<|begin of sentence|>"), _bars("<|end of sentence|>")

FAMILIES = {
    "chatml": Family(
        template("chatml"), ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_start|>", "<|im_end|>", "B<|im_end|>"
    ),
    "llama-2": Family(
        template("llama-2"), ("<unk>", "<s>", "</s>"), "<s>", "</s>", "B </s>", kind="spaces", adds_bos=True
    ),
    "llama-3": Family(
        template("llama-3"),
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "B<|eot_id|>",
        adds_bos=True,
    ),
    "mistral": Family(
        template("mistral"), ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), "<s>", "</s>", " B</s>", adds_bos=True
    ),
    "gemma": Family(
        template("gemma"),
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        "<bos>",
        "<eos>",
        "B<end_of_turn>",
        kind="inner spaces",
        added=("\n\n", "<h1>"),
        adds_bos=True,
    ),
    "qwen2.5": Family(
        template("qwen2.5"),
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|endoftext|>",
        "<|im_end|>",
        "B<|im_end|>",
        kind="nfc",
        added=("<tool_call>", "</tool_call>"),
        config={"add_bos_token": False},
    ),
    "qwen3": Family(
        template("qwen3"),
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|endoftext|>",
        "<|im_end|>",
        "<think>\n\n</think>\n\nB<|im_end|>",
        added=("<think>", "</think>"),
    ),
    "phi-3": Family(
        template("phi-3"),
        ("<unk>", "<s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|user|>", "<|end|>"),
        "<s>",
        "<|endoftext|>",
        "B<|end|>",
        kind="spaces",
        rstrip=True,
    ),
    "zephyr": Family(template("zephyr"), ("<unk>", "<s>", "</s>"), "<s>", "</s>", "B</s>", kind="spaces"),
    "deepseek": Family(
        template("deepseek"),
        (_BEGIN, _END),
        _BEGIN,
        _END,
        f"B{_END}",
        added=(_bars("<|User|>"), _bars("<|Assistant|>")),
        config={"add_bos_token": True, "add_eos_token": False},
    ),
    "vicuna": Family(template("vicuna"), ("<unk>", "<s>", "</s>"), "<s>", "</s>", " B</s>", adds_bos=True),
}


def make_folder(path: Path, family: Family, *, template: str | None = None, pad: str | None = None) -> Path:
    """A model folder's tokenizer files. `template` "" writes none."""
    path.mkdir(parents=True, exist_ok=True)
    source = family.template if template is None else template
    (path / "tokenizer.json").write_text(_pipeline(family), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": family.bos,
        "eos_token": family.eos,
        "pad_token": pad or family.special[0],
        "clean_up_tokenization_spaces": False,
        **family.config,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if source:
        (path / "chat_template.jinja").write_text(source, encoding="utf-8")
    return path


def _pipeline(family: Family) -> str:
    return _trained(family.special, family.added, family.kind, family.rstrip, family.bos if family.adds_bos else "")


@cache
def _trained(special: tuple[str, ...], added: tuple[str, ...], kind: str, rstrip: bool, bos: str) -> str:
    """`kind`: "bytes" as GPT-2, "nfc" the same after normalisation as Qwen, "spaces" as Llama-2's SentencePiece,
    "inner spaces" as Gemma's, which puts no space before a text."""
    tokens = [AddedToken(token, special=True, rstrip=rstrip, normalized=False) for token in special]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if "spaces" in kind:
        tokenizer = Tokenizer(models.BPE(unk_token=special[0], fuse_unk=True, byte_fallback=True))
        first = kind == "spaces"
        prepend = [normalizers.Prepend("\u2581")] if first else []
        strip = [decoders.Strip(" ", 1, 0)] if first else []
        tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "\u2581")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        tokens += [AddedToken(f"<0x{byte:02X}>") for byte in range(256)]
        alphabet = [chr(code) for code in range(32, 127)] + ["\u2581", "\n"]
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.NFC() if kind == "nfc" else None
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(tokens) + len(alphabet) + 120,
        special_tokens=tokens,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(_CORPUS)], trainer)
    if "spaces" in kind:  # byte tokens are pieces of the model, matched in no text
        value = json.loads(tokenizer.to_str())
        value["added_tokens"] = [token for token in value["added_tokens"] if not token["content"].startswith("<0x")]
        tokenizer = Tokenizer.from_str(json.dumps(value))
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    text: str = tokenizer.to_str()
    return text
