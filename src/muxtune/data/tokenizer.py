"""The tokenizer of a model folder in Hugging Face layout, read with the `tokenizers` library alone.

    tokenizer.json                       the pipeline: normaliser, pre-tokeniser, model, added tokens
    tokenizer_config.json                names of the special tokens, chat template
    special_tokens_map.json              older place for the names
    chat_template.jinja, additional_chat_templates/*.jinja      newer place for the templates
    generation_config.json               ids that end a generation

Boundary: never transformers, never pickle, no network. Ids equal those of transformers' fast tokenizers of the same
folder, with and without special tokens (a test holds it). What tokenizer.json's post-processor puts around a text is
kept as two tuples of ids, so that BOS and EOS are added in one place, once; `add_bos_token` and `add_eos_token` of the
config decide nothing where there is a tokenizer.json, there as here.

`encode` reads the names of special tokens as these tokens; `literal.py` reads them as the text they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from muxtune.errors import DataError

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_FILE_BYTES = 256 * 2**20  # the largest tokenizer.json in use has about 35 MB


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What the folder's small files say, beside the pipeline itself."""

    names: Mapping[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>": what a template can use
    added: tuple[AddedToken, ...] = ()
    extra: tuple[str, ...] = ()  # special tokens without a name
    templates: Mapping[str, str] = field(default_factory=dict)
    end_ids: tuple[int, ...] = ()


class TextTokenizer:
    """Text to ids and back. Immutable after construction; the methods may be called from several threads."""

    def __init__(self, pipeline: Tokenizer, parts: TokenizerParts, *, name: str) -> None:
        self.name = name
        self.special_names = dict(parts.names)
        self.templates = dict(parts.templates)
        self._pipeline = pipeline
        self._end_ids = parts.end_ids
        pipeline.no_truncation()
        pipeline.no_padding()
        _add_missing(pipeline, parts)
        self.prefix_ids, self.suffix_ids = self._surroundings()
        # Without a post-processor offsets keep the space before a word, and nothing can add BOS a second time.
        pipeline.post_processor = None

    @classmethod
    def from_folder(cls, path: str | Path, *, name: str | None = None) -> TextTokenizer:
        """`name` is what messages call it, the folder's name by default.

        Raises DataError where the folder holds no fast tokenizer, or a damaged one.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise DataError(
                "there is no tokenizer.json",
                where=str(folder),
                hint="a fast tokenizer is needed: transformers' AutoTokenizer saves one with save_pretrained",
            )
        try:
            pipeline = Tokenizer.from_str(_read(file))
        except Exception as error:  # the library raises bare Exception for a file that it cannot read
            raise DataError(f"the tokenizer cannot be read: {error}", where=str(file)) from None
        return cls(pipeline, _read_parts(folder), name=name or folder.name)

    @property
    def bos_token(self) -> str | None:
        return self.special_names.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_names.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_names.get("pad_token")

    @property
    def bos_id(self) -> int | None:
        return self.token_id(self.bos_token)

    @property
    def eos_id(self) -> int | None:
        return self.token_id(self.eos_token)

    @property
    def pad_id(self) -> int | None:
        return self.token_id(self.pad_token)

    @property
    def chat_template(self) -> str | None:
        """The template for conversations; `templates` has the others, such as "tool_use"."""
        return self.templates.get("default")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a generation as the folder's files say; `Renderer.eos_ids` adds the template's end of turn."""
        eos = () if self.eos_id is None else (self.eos_id,)
        return tuple(dict.fromkeys((*eos, *self._end_ids)))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._pipeline.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def added_tokens(self) -> dict[str, AddedToken]:
        """Tokens matched in the text before the pipeline runs, by their content."""
        return {token.content: token for token in self._pipeline.get_added_tokens_decoder().values()}

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """The added tokens that are control tokens: no text of a user may become one of them."""
        return frozenset(content for content, token in self.added_tokens.items() if token.special)

    @cached_property
    def fingerprint(self) -> str:
        """Changes whenever any text could be given other ids; templates have a fingerprint of their own."""
        surroundings = [self.prefix_ids, self.suffix_ids, sorted(self.special_names.items())]
        return hashlib.sha256((self.to_json() + json.dumps(surroundings)).encode()).hexdigest()

    def token_id(self, token: str | None) -> int | None:
        return None if token is None else self._pipeline.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`, as transformers gives them. Raises DataError for half a surrogate pair."""
        ids = self.encode_with_offsets(text)[0]
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special_tokens else ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of `text` alone, and the characters [start, end) that each stands for."""
        try:
            encoding = self._pipeline.encode(text, add_special_tokens=False)
        except TypeError:
            raise DataError("the text holds half of a surrogate pair, which no tokenizer can read") from None
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._pipeline.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def to_json(self) -> str:
        """The pipeline in the form of tokenizer.json, less its post-processor."""
        return self._pipeline.to_str()

    def _surroundings(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that come before and after a text when special tokens are asked for."""
        text = next((text for text in ("a", *self._pipeline.get_vocab()) if self.encode(text)), "")
        bare = self._pipeline.encode(text, add_special_tokens=False).ids
        full = self._pipeline.encode(text, add_special_tokens=True).ids
        starts = [i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare]
        if not starts:
            raise DataError("its post-processor rewrites the text, which is not supported", where=self.name)
        return tuple(full[: starts[0]]), tuple(full[starts[0] + len(bare) :])


def _add_missing(pipeline: Tokenizer, parts: TokenizerParts) -> None:
    """Tokens that only the config knows join the pipeline, as they do in transformers."""
    known = {token.content: token.special for token in pipeline.get_added_tokens_decoder().values()}
    for token in parts.added:
        if token.content not in known:
            (pipeline.add_special_tokens if token.special else pipeline.add_tokens)([token])
            known[token.content] = token.special
    for content in (*parts.names.values(), *parts.extra):
        if not known.get(content, False):
            pipeline.add_special_tokens([AddedToken(content, special=True, normalized=False)])


def _read_parts(folder: Path) -> TokenizerParts:
    config = _read_json(folder / "tokenizer_config.json")
    older = _read_json(folder / "special_tokens_map.json")
    names = {key: text for key in _NAMES if (text := _content(config.get(key)) or _content(older.get(key)))}
    unnamed: list[object] = []
    for extra in (config.get("extra_special_tokens"), config.get("additional_special_tokens")):
        if isinstance(extra, dict):
            names |= {str(key): text for key, value in extra.items() if (text := _content(value))}
        elif isinstance(extra, list):
            unnamed += extra
    return TokenizerParts(
        names=names,
        added=_added_tokens(config),
        extra=tuple(text for value in unnamed if (text := _content(value))),
        templates=_templates(folder, config),
        end_ids=_end_ids(_read_json(folder / "generation_config.json")),
    )


def _added_tokens(config: Mapping[str, object]) -> tuple[AddedToken, ...]:
    """In the order of their ids."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return ()
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    found = [
        (int(key), AddedToken(value["content"], **{flag: bool(value[flag]) for flag in flags if flag in value}))
        for key, value in listed.items()
        if isinstance(value, dict) and isinstance(value.get("content"), str) and str(key).isdigit()
    ]
    return tuple(token for _, token in sorted(found, key=lambda pair: pair[0]))


def _templates(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    inline = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(inline, str):
        templates["default"] = inline
    elif isinstance(inline, list):
        for entry in inline:
            if (
                isinstance(entry, dict)
                and isinstance(entry.get("name"), str)
                and isinstance(entry.get("template"), str)
            ):
                templates[entry["name"]] = entry["template"]
    files = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:  # files replace what the config says, as in transformers
        templates = {name: _read(file) for name, file in files.items()}
    return templates


def _end_ids(generation: Mapping[str, object]) -> tuple[int, ...]:
    value = generation.get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return tuple(item for item in values if isinstance(item, int) and not isinstance(item, bool))


def _content(value: object) -> str | None:
    """A token is written as its text, or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _read_json(file: Path) -> dict[str, object]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise DataError(f"the file is not JSON: {error}", where=str(file)) from None
    if not isinstance(value, dict):
        raise DataError("the file is not a JSON object", where=str(file))
    return value


def _read(file: Path) -> str:
    if file.stat().st_size > _MAX_FILE_BYTES:
        raise DataError(f"the file is larger than {_MAX_FILE_BYTES:,} bytes", where=str(file))
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError("the file is not UTF-8", where=str(file)) from None
