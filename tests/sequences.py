"""Random token sequences with masks, as the engine takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from muxtune.data.types import TokenSequence
from tests.tiny_tokenizer import VOCAB


def random_sequences(
    lengths: Sequence[int], *, seed: int, first_index: int = 0, trained: float = 0.6
) -> tuple[TokenSequence, ...]:
    """One sequence a length, which is that of its inputs, at least 2; a share `trained` of its tokens are targets, with
    holes between them as in a chat of several turns. The last input always is one, and so is the token that ends it."""
    rng = np.random.default_rng(seed)
    made = []
    for offset, length in enumerate(lengths):
        assert length >= 2, "nothing predicts the first token"
        ids = rng.integers(3, VOCAB, size=length, dtype=np.int32)
        mask = rng.random(length) < trained
        mask[0], mask[-1] = False, True
        made.append(TokenSequence(first_index + offset, np.append(ids, ids[0]), np.append(mask, True)))
    return tuple(made)
