"""The house's measures as a test: sizes, names, docstrings, and nothing of anyone's machine in the repository."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
CODE = SOURCES + sorted(path for part in ("tests", "benchmarks", "examples") for path in (ROOT / part).rglob("*.py"))

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
SELF_EVIDENT_LINES = 5  # a public function this short may do without a docstring
BANNED_WORDS = {"manager", "helper", "helpers", "util", "utils", "handler", "handlers", "misc", "common"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _definitions(path: Path) -> Iterator[Function | ast.ClassDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function | ast.ClassDef):
            yield node


@pytest.mark.parametrize("path", CODE, ids=_name)
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    long = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in _definitions(path)
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert not long, f"functions over {MAX_FUNCTION_LINES} lines"


@pytest.mark.parametrize("path", CODE, ids=_name)
def test_every_module_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) or not tree.body, "a module without a docstring"


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_names_are_the_domains(path: Path) -> None:
    parts = re.split(r"[/_.]", _name(path))
    assert not BANNED_WORDS.intersection(parts), "a module named after nothing"
    vague = [
        node.name
        for node in _definitions(path)
        if isinstance(node, ast.ClassDef) and re.search("(Manager|Helper|Utils?|Handler|Misc)s?$", node.name)
    ]
    assert not vague


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_public_functions_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text())
    bare = [node.name for node in _public(tree.body) if not ast.get_docstring(node)]
    assert not bare, "public functions without a docstring"


def _public(body: list[ast.stmt], in_class: bool = False) -> Iterator[Function]:
    """Public functions and methods, but for those of a few lines, whose name and types say it all, and for decorated
    methods (properties, overloads, validators)."""
    for node in body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        if isinstance(node, ast.ClassDef):
            yield from _public(node.body, in_class=True)
        elif _body_lines(node) > SELF_EVIDENT_LINES and not (in_class and node.decorator_list):
            yield node


def _body_lines(node: Function) -> int:
    return (node.end_lineno or 0) - node.body[0].lineno + 1


@pytest.mark.parametrize("path", CODE, ids=_name)
def test_every_silenced_check_names_its_code(path: Path) -> None:
    bare = re.findall(r"#\s*(?:type:\s*ignore(?!\[)|noqa(?!:\s*[A-Z]))", path.read_text())
    assert not bare or path == Path(__file__)


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_tracked_file_holds_a_path_of_a_machine() -> None:
    homes = "/home/(?!someone|user|you)[a-z]+/|/Users/(?!someone|user|you)[a-z]+/"
    pattern = re.compile(f"{re.escape(str(ROOT))}/|{homes}")
    found = [
        f"{_name(path)}:{number}"
        for path in _tracked()
        for number, line in enumerate(path.read_text(errors="ignore").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found


def test_no_tracked_file_is_large() -> None:
    large = {_name(path): path.stat().st_size for path in _tracked() if path.stat().st_size > 500_000}
    assert not large, "over 500 kB"
