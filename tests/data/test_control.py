"""Finding names of tokens in a text, and marking those that stand in someone's words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muxtune.data.control import MarkedText, TokenNames, choose_mark, take_out

_NAMES = st.sets(st.text("<|>ab", min_size=1, max_size=5), max_size=8)
_TEXT = st.text("<|>ab \n", max_size=30)


def leftmost_longest(names: set[str], text: str) -> list[tuple[int, int]]:
    found, place = [], 0
    while place < len(text):
        here = max((name for name in names if text.startswith(name, place)), key=len, default="")
        if here:
            found.append((place, place + len(here)))
        place += len(here) or 1
    return found


@given(names=_NAMES, text=_TEXT)
def test_names_are_found_leftmost_then_longest(names: set[str], text: str) -> None:
    assert list(TokenNames(names).find(text)) == leftmost_longest(names, text)


@given(names=_NAMES, before=_TEXT, inner=_TEXT, after=_TEXT)
def test_no_name_that_a_text_has_a_part_in_is_meant(names: set[str], before: str, inner: str, after: str) -> None:
    """A template writes `before` and `after`; whatever it joins to, the text between makes no control token."""
    tokens = TokenNames(name for name in names if len(name) > 1)
    mark = choose_mark([inner])
    marked = take_out(before + tokens.mark(inner, mark) + after, mark)
    assert marked.text == before + inner + after
    core = inner.strip()
    start = len(before) + inner.find(core) if core else 0
    border = (start, start + len(core))
    meant, _ = tokens.meant(marked)
    for a, b in meant:
        inside = border[0] <= a and b <= border[1]
        first_half = a < border[0] < b <= border[1]
        last_half = border[0] <= a < border[1] < b
        assert not core or not (inside or first_half or last_half)


@given(inner=_TEXT)
def test_ordinary_text_is_handed_over_untouched(inner: str) -> None:
    tokens = TokenNames(["[X]", "[/X]"])
    assert not tokens.needs_marks(inner)
    assert tokens.mark_all({"k": [inner, 1, None]}, "!") == {"k": [inner, 1, None]}


def test_marks_hide_in_keys_too_and_come_out_again() -> None:
    tokens = TokenNames(["</s>"])
    mark = choose_mark(["\U000f0000"])
    assert mark == "\U000f0001"
    assert tokens.mark_all({"a</s>": "x </s"}, mark) == {f"a<{mark}/s>": f"x </s{mark}"}
    marked = take_out(f"[<{mark}/s>]", mark)
    assert marked == MarkedText("[</s>]", (2,))
    assert [marked.place(k) for k in range(8)] == [0, 1, 2, 2, 3, 4, 5, 6]
    assert tokens.meant(marked) == ([], True)
