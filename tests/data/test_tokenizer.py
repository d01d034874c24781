"""Our reading of a tokenizer folder against transformers' reading of the same folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from muxtune.data.control import TokenNames
from muxtune.data.literal import LiteralTokenizer
from muxtune.data.tokenizer import TextTokenizer, TokenizerParts
from muxtune.errors import DataError
from tests.data.folders import FAMILIES, make_folder

TEXTS = ("", "hi", " two  spaces ", "Caf\u0065\u0301 \N{SNOWMAN} \N{PILE OF POO}\n\n1234", "a\tb\r\n\u00a0c")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: make_folder(root / name, family) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def ours(folders: dict[str, Path]) -> dict[str, TextTokenizer]:
    return {name: TextTokenizer.from_folder(folder) for name, folder in folders.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_equal_transformers(folders: dict[str, Path], ours: dict[str, TextTokenizer], name: str) -> None:
    theirs, mine = AutoTokenizer.from_pretrained(folders[name]), ours[name]
    for text in (*TEXTS, *(f"x {token} y{token}" for token in theirs.added_tokens_encoder)):
        assert mine.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
        assert mine.encode(text, add_special_tokens=True) == theirs(text)["input_ids"]
        ids = mine.encode(text)
        assert mine.decode(ids) == theirs.decode(ids)
        assert mine.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_special_tokens_equal_transformers(folders: dict[str, Path], ours: dict[str, TextTokenizer], name: str) -> None:
    theirs, mine = AutoTokenizer.from_pretrained(folders[name]), ours[name]
    assert (mine.bos_id, mine.eos_id, mine.pad_id) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert (mine.bos_token, mine.eos_token, mine.pad_token) == (theirs.bos_token, theirs.eos_token, theirs.pad_token)
    assert mine.special_names == theirs.special_tokens_map
    assert mine.vocab_size == len(theirs)
    assert mine.special_tokens == {t.content for t in theirs.added_tokens_decoder.values() if t.special}
    assert mine.chat_template == theirs.chat_template


def test_tokens_that_only_the_config_knows_get_the_same_ids(tmp_path: Path) -> None:
    make_folder(tmp_path, FAMILIES["chatml"])
    file = tmp_path / "tokenizer_config.json"
    size = len(AutoTokenizer.from_pretrained(tmp_path))
    added = {"content": "<tool>", "special": False, "lstrip": False, "rstrip": True, "normalized": False}
    config = json.loads(file.read_text()) | {
        "added_tokens_decoder": {str(size): added, str(size + 1): {"content": "<img>", "special": True}},
        "unk_token": {"__type": "AddedToken", "content": "<unknown>", "special": True},
        "extra_special_tokens": ["<extra>"],
    }
    file.write_text(json.dumps(config))
    theirs, mine = AutoTokenizer.from_pretrained(tmp_path), TextTokenizer.from_folder(tmp_path)
    text = "a<tool>  b<img>c<unknown>d<extra>"
    assert mine.encode(text) == theirs.encode(text)
    assert {"<img>", "<unknown>", "<extra>"} <= mine.special_tokens
    assert "<tool>" not in mine.special_tokens


def test_names_come_from_the_older_map_too(tmp_path: Path) -> None:
    make_folder(tmp_path, FAMILIES["llama-2"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    older = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    mine = TextTokenizer.from_folder(tmp_path)
    assert (mine.bos_token, mine.eos_token, mine.pad_token) == ("<s>", "</s>", None)
    assert (mine.bos_id, mine.eos_id, mine.pad_id) == (1, 2, None)


@pytest.mark.parametrize("form", ["config", "config list", "file", "file over config", "none"])
def test_where_the_template_is_found(tmp_path: Path, form: str) -> None:
    make_folder(tmp_path, FAMILIES["chatml"], template="")
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    if form in ("config", "file over config"):
        config["chat_template"] = "from the config" if form == "config" else "stale"
    if form == "config list":
        config["chat_template"] = [
            {"name": "default", "template": "from the config"},
            {"name": "tool_use", "template": "for tools"},
        ]
    if form.startswith("file"):
        (tmp_path / "chat_template.jinja").write_text("from the file")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    file.write_text(json.dumps(config))
    mine = TextTokenizer.from_folder(tmp_path)
    expected = {"none": None, "config": "from the config", "config list": "from the config"}
    assert mine.chat_template == expected.get(form, "from the file")
    assert mine.templates.get("tool_use") == ("for tools" if "list" in form or "file" in form else None)


@pytest.mark.parametrize("value, expected", [(4, (1, 4)), ([1, 4], (1, 4)), (None, (1,)), (True, (1,))])
def test_end_ids_of_the_generation_config(tmp_path: Path, value: object, expected: tuple[int, ...]) -> None:
    make_folder(tmp_path, FAMILIES["llama-3"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert TextTokenizer.from_folder(tmp_path).eos_ids == expected


@pytest.mark.parametrize(
    "file, content, shown",
    [
        ("tokenizer.json", None, "there is no tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json: the tokenizer cannot be read"),
        ("tokenizer.json", "\x80", "tokenizer.json: the file is not UTF-8"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json: the file is not a JSON object"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: the file is not JSON"),
        ("special_tokens_map.json", "[" * 9999, "special_tokens_map.json: the file is not JSON"),
    ],
)
def test_a_damaged_folder_is_refused_by_file(tmp_path: Path, file: str, content: str | None, shown: str) -> None:
    make_folder(tmp_path, FAMILIES["chatml"])
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError) as caught:
        TextTokenizer.from_folder(tmp_path)
    assert shown in str(caught.value)


def test_half_of_a_surrogate_pair_is_a_data_error(ours: dict[str, TextTokenizer]) -> None:
    with pytest.raises(DataError, match="surrogate"):
        ours["chatml"].encode("a\ud800b")


def test_the_fingerprint_follows_ids_and_not_templates(tmp_path: Path) -> None:
    chatml = FAMILIES["chatml"]
    prints = {
        name: TextTokenizer.from_folder(make_folder(tmp_path / name, family, template=template)).fingerprint
        for name, family, template in (
            ("one", chatml, None),
            ("same", chatml, "another template"),
            ("other bos", FAMILIES["llama-3"], None),
        )
    }
    assert prints["one"] == prints["same"] != prints["other bos"]
    file = tmp_path / "one" / "tokenizer.json"
    value = json.loads(file.read_text())
    value["pre_tokenizer"]["use_regex"] = False
    file.write_text(json.dumps(value))
    assert TextTokenizer.from_folder(tmp_path / "one").fingerprint != prints["same"]


def test_neither_torch_nor_transformers_is_loaded() -> None:
    script = "import sys, muxtune.data.render, muxtune.data.preview; print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


# What control tokens are only text in: their names, parts of them, and ordinary text around.
_PIECES = [
    "<|im_end|>",
    "<|im_start|>",
    "<|im_",
    "end|>",
    "</s>",
    "<s>",
    "[INST]",
    "<",
    "|>",
    "<think>",
    "a",
    " ",
    "\n",
    "é",
]
_TEXT = st.lists(st.sampled_from(_PIECES), max_size=12).map("".join)


@pytest.mark.parametrize("name", ["chatml", "llama-2", "mistral", "qwen3", "phi-3", "gemma"])
@given(text=_TEXT)
def test_literal_is_plain_where_every_name_is_meant(ours: dict[str, TextTokenizer], name: str, text: str) -> None:
    tokenizer = ours[name]
    spans = list(TokenNames(tokenizer.special_tokens).find(text))
    assert _literal(tokenizer).encode(text, spans) == tokenizer.encode_with_offsets(text)


@pytest.mark.parametrize("name", ["chatml", "llama-2", "mistral", "qwen3", "phi-3", "gemma"])
@given(text=_TEXT)
def test_literal_makes_no_control_token_from_text(ours: dict[str, TextTokenizer], name: str, text: str) -> None:
    tokenizer = ours[name]
    ids, offsets = _literal(tokenizer).encode(text)
    assert not {tokenizer.token_id(token) for token in tokenizer.special_tokens}.intersection(ids)
    assert tokenizer.decode(ids) == text
    assert all(0 <= start <= end <= len(text) for start, end in offsets)


_made: dict[str, LiteralTokenizer] = {}


def _literal(tokenizer: TextTokenizer) -> LiteralTokenizer:
    if tokenizer.name not in _made:
        _made[tokenizer.name] = LiteralTokenizer(tokenizer, tokenizer.special_tokens)
    return _made[tokenizer.name]


def test_a_control_token_that_the_model_could_spell_stays_out_of_reach() -> None:
    """Unigram has `</s>` among its pieces, so even without added tokens its text would become the token."""
    pieces = [("<unk>", 0.0), ("</s>", -1.0), *((char, -2.0) for char in "</s>ab\u2581")]
    pipeline = Tokenizer(models.Unigram(pieces, 0, False))
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace()
    pipeline.decoder = decoders.Metaspace()
    pipeline.add_special_tokens(["</s>"])
    tokenizer = TextTokenizer(pipeline, TokenizerParts(names={"eos_token": "</s>"}), name="unigram")
    assert tokenizer.eos_id == 1
    ids, _ = LiteralTokenizer(tokenizer, ["</s>"]).encode("a</s>b</s>", [(6, 10)])
    assert ids.count(1) == 1 and ids[-1] == 1
    assert tokenizer.decode(ids) == "a</s>b</s>"


def test_a_text_that_could_pass_for_an_alias_is_refused(ours: dict[str, TextTokenizer]) -> None:
    with pytest.raises(DataError, match="private-use"):
        _literal(ours["chatml"]).encode("</s> \U00100001")
