"""Parsing within bounds: whatever the text, a tree with lines or a ConfigError with one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from muxtune.errors import ConfigError
from muxtune.spec import yaml_tree
from muxtune.spec.tree import Table, plain, way_to
from muxtune.spec.yaml_tree import MAX_BYTES, MAX_DEPTH, parse_yaml, read_yaml


@pytest.fixture(params=["CSafeLoader", "SafeLoader"], autouse=True)
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML has a parser in C and one in Python; a machine may have only the second."""
    monkeypatch.setattr(yaml_tree, "_LOADER", getattr(yaml, request.param))


def parsed(text: str) -> object:
    node = parse_yaml(text, "f.yaml")
    assert node is not None
    return plain(node)


def refusal(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f.yaml")
    return caught.value


def test_scalars_keep_their_text_and_only_a_plain_null_is_none() -> None:
    text = "{a: 007, b: 2e-3, c: no, d: 2026-01-01, e: null, f: ~, g: , h: 'null', i: \"\", j: !!str null, k: 1:30}"
    expected = {"a": "007", "b": "2e-3", "c": "no", "d": "2026-01-01", "e": None, "f": None, "g": None}
    assert parsed(text) == {**expected, "h": "null", "i": "", "j": "null", "k": "1:30"}


def test_every_value_knows_the_line_of_its_key() -> None:
    node = parse_yaml("a:\n  b:\n  - x\n  - y\n", "f.yaml")
    assert isinstance(node, Table)
    paths = [("a",), ("a", "b"), ("a", "b", "0"), ("a", "b", "1")]
    assert [list(way_to(node, path))[-1].origin.line for path in paths] == [1, 2, 3, 4]


def test_anchors_and_merge_keys() -> None:
    text = "base: &b {r: 8, alpha: 16}\nx: {<<: *b, r: 4}\ny: {<<: [*b, {r: 1, z: 2}]}\nw: *b\n"
    assert parsed(text) == {
        "base": {"r": "8", "alpha": "16"},
        "x": {"r": "4", "alpha": "16"},
        "y": {"r": "8", "alpha": "16", "z": "2"},
        "w": {"r": "8", "alpha": "16"},
    }
    assert "<< should name a mapping" in refusal("x: {<<: 3}").message


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("a: 1\nb: [1, 2\n", "f.yaml:3", "is not YAML"),
        ("a: 1\nb: {c: 1}}\n", "f.yaml:2", "is not YAML"),
        ("a: 1\n\tb: 2\n", "f.yaml:2", "is not YAML"),
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3", "key 'a' is given twice"),
        ("a:\n  b: {c: 1, c: 2}\n", "f.yaml:2", "key 'c' is given twice"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2", "more than one YAML document"),
        ("a: 1\nb: !!python/object/apply:os.system [ls]\n", "f.yaml:2", "has the YAML tag"),
        ("a: !!binary aGk=\n", "f.yaml:1", "has the YAML tag"),
        ("a: 1\nb: *nowhere\n", "f.yaml:2", "before the end of its anchor"),
        ("a: &a\n  b: *a\n", "f.yaml:2", "before the end of its anchor"),
        ("a: 1\n? [b, c]\n: 2\n", "f.yaml:2", "a key should be a plain word"),
        ("a: \x00b\n", "f.yaml", "is not YAML"),
    ],
)
def test_faults_name_their_line(text: str, where: str, message: str) -> None:
    error = refusal(text)
    assert message in error.message
    assert error.where == where


def test_a_bomb_of_anchors_stops_at_once() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 20)]
    start = time.perf_counter()
    error = refusal("\n".join(levels))
    assert "more than 100000 values" in error.message
    assert time.perf_counter() - start < 5


def test_depth_is_bounded_also_through_anchors() -> None:
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parsed(deepest)
    assert "deep" in refusal(f"[{deepest}]").message
    assert "nest" in refusal("[" * 50_000).message  # the C parser has a bound of its own
    chain = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, MAX_DEPTH + 5)]
    assert "deep" in refusal("\n".join(chain)).message


def test_a_file_is_bounded_in_size(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_bytes(b"a: b\n#" + b"x" * (MAX_BYTES - 6))
    assert plain(read_yaml(path)) == {"a": "b"}
    path.write_bytes(b"a: b\n#" + b"x" * (MAX_BYTES - 5))
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        read_yaml(path)


def test_a_byte_order_mark_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfa: b\n")
    assert plain(read_yaml(tmp_path / "bom.yaml")) == {"a": "b"}


@pytest.mark.parametrize("escape", [r'a: "\ud800"', r'a: "\uDFFF x"'])
def test_lone_surrogates_are_refused(escape: str) -> None:
    assert refusal(escape).where == "f.yaml:1"


@given(st.text(alphabet=st.sampled_from("ab:-[]{},&*!|>'\"#%@ \n\t?<~0"), max_size=60))
def test_no_text_escapes_the_error_tree(text: str) -> None:
    try:
        parse_yaml(text, "f.yaml")
    except ConfigError as error:
        assert error.where is not None and error.where.startswith("f.yaml")
