"""Tokenises text in which some names of control tokens are only text.

A user may write `<|im_end|>` or `</s>` in a message; it must not end the turn. Tokenisers match added tokens anywhere
in a text, so the pipeline is copied with its control tokens *renamed*: each to one private-use character, repeated to
the old name's length (so character offsets stay valid), the id unchanged. Control tokens that are meant are replaced
by these aliases in the text; everything else, whatever it looks like, is ordinary text to the copy - there is no other
way to these ids in it. One pass over the whole text, so whatever surrounds an ordinary piece (a leading space, a merge
across it) is as in the plain pipeline: for a text without forged tokens, both give the same ids.

Cost: one copy of the pipeline for each tokenizer that meets such a text at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from muxtune.data.tokenizer import TextTokenizer
from muxtune.errors import DataError

_FIRST_ALIAS, _LAST_ALIAS = 0x100000, 0x10FFFD  # private-use plane 16: in no font's use, unlike plane 15
_ALIASES = re.compile(f"[{chr(_FIRST_ALIAS)}-{chr(_LAST_ALIAS)}]")

Span = tuple[int, int]


class LiteralTokenizer:
    """The copy of one tokenizer in which `control` tokens are reached by span, never by their names."""

    def __init__(self, tokenizer: TextTokenizer, control: Iterable[str]) -> None:
        tokens = sorted(token for token in control if tokenizer.token_id(token) is not None)
        if len(tokens) > _LAST_ALIAS - _FIRST_ALIAS:
            raise DataError("the tokenizer has too many special tokens", where=tokenizer.name)
        self._alias = {token: chr(_FIRST_ALIAS + k) * len(token) for k, token in enumerate(tokens)}
        self._pipeline = Tokenizer.from_str(_renamed(tokenizer.to_json(), self._alias))
        for token, alias in self._alias.items():
            if self._pipeline.token_to_id(alias) != tokenizer.token_id(token):
                raise DataError(f"the special token {token!r} cannot be told from text", where=tokenizer.name)

    def encode(self, text: str, control: Sequence[Span] = ()) -> tuple[list[int], list[Span]]:
        """Ids and character offsets of `text`; only the spans in `control`, in order, are control tokens.

        Raises DataError where the text holds a character of private-use plane 16, which could pass for an alias.
        """
        if _ALIASES.search(text):
            raise DataError("text with the name of a special token and private-use characters (plane 16) in it")
        pieces: list[str] = []
        end = 0
        for start, stop in control:
            pieces += [text[end:start], self._alias[text[start:stop]]]
            end = stop
        try:
            encoding = self._pipeline.encode("".join([*pieces, text[end:]]), add_special_tokens=False)
        except TypeError:
            raise DataError("the text holds half of a surrogate pair, which no tokenizer can read") from None
        return encoding.ids, encoding.offsets


def _renamed(pipeline: str, alias: dict[str, str]) -> str:
    """tokenizer.json with other names for some tokens: in the added tokens, the vocabulary, merges and unk_token."""
    value = json.loads(pipeline)
    for added in value["added_tokens"]:
        added["content"] = alias.get(added["content"], added["content"])
    model = value["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {alias.get(token, token): index for token, index in vocab.items()}
    elif isinstance(vocab, list):  # Unigram: [token, score]
        model["vocab"] = [[alias.get(token, token), score] for token, score in vocab]
    if isinstance(model.get("merges"), list):
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, alias)]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = alias.get(model["unk_token"], model["unk_token"])
    return json.dumps(value, ensure_ascii=False)


def _makes(merge: str | Sequence[str], alias: dict[str, str]) -> bool:
    """Whether a merge of BPE uses a renamed token, or makes one."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in alias or right in alias or left + right in alias
