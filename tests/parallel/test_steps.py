"""A piece of a pass that is waited for wherever it waits."""

from __future__ import annotations

from muxtune.parallel.steps import Steps, run_plain


class _Noted:
    """Something in flight that notes when it was waited for."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self._log.append(self._name)


def _piece(log: list[str]) -> Steps[int]:
    yield _Noted(log, "first")
    log.append("between")
    yield _Noted(log, "second")
    return 7


def _nothing_to_wait_for() -> Steps[str]:
    return "result"
    yield


def test_it_waits_where_the_piece_does_and_answers_what_it_returns() -> None:
    log: list[str] = []
    assert run_plain(_piece(log)) == 7
    assert log == ["first", "between", "second"]


def test_a_piece_that_waits_for_nothing() -> None:
    assert run_plain(_nothing_to_wait_for()) == "result"
