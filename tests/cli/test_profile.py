"""`muxtune profile`: a table that is measured once, shown, and found again."""

from __future__ import annotations

import json
import re
from pathlib import Path

from muxtune.plan.profile import VERSION, from_json
from tests.cli.shell import Shell


def test_a_table_is_measured_kept_and_shown(shell: Shell, tiny_llama: Path, cache: Path) -> None:
    first = shell.run("profile", str(tiny_llama), "--threads", "1", "--fresh")
    assert first.code == 0, first.err
    lines = first.out.splitlines()
    assert "2 layers, float32, cpu" in lines[0] and lines[0].endswith(", 1 thread")
    assert lines[1].startswith("measured now, kept")
    kept = list((cache / "muxtune" / "profiles").iterdir())
    assert any(str(path) in lines[1] for path in kept)
    for heading in ("one layer: rows", "attention of a sequence", "head: trained rows", "adapter on 64 rows, in all"):
        assert any(line.startswith(heading) for line in lines)
    labels = {line.split()[0] for line in lines if line}
    assert {"lora", "dora", "ia3", "houlsby", "prefix_tuning", "lora+dropout"} <= labels
    again = shell.run("profile", str(tiny_llama), "--threads", "1")
    assert re.match(r"measured (\d+m?\d*s ago|just now), kept in ", again.out.splitlines()[1])
    assert again.out.splitlines()[2:] == lines[2:]
    anew = shell.run("profile", str(tiny_llama), "--threads", "1", "--fresh")
    assert "measured now" in anew.out and anew.out.splitlines()[2:] != lines[2:]
    assert len(list((cache / "muxtune" / "profiles").iterdir())) == len(kept)


def test_json_is_the_table_and_fewer_layers_are_another(shell: Shell, tiny_llama: Path) -> None:
    told = shell.run("profile", str(tiny_llama), "--json", "--num-hidden-layers", "1", "--dtype", "fp64")
    assert told.code == 0, told.err
    table = from_json(told.out)
    assert table is not None and (table.layers, table.dtype) == (1, "float64")
    assert json.loads(told.out)["version"] == VERSION and table.measured_at_s > 1e9


def test_wrong_use_is_told(shell: Shell, tiny_llama: Path) -> None:
    for arguments, told in (
        (["nothing-like-it"], "there is no model 'nothing-like-it'"),
        ([str(tiny_llama), "--dtype", "int4"], "--dtype"),
        ([str(tiny_llama), "--block", "slow"], "--block"),
        ([str(tiny_llama), "--threads", "0"], "--threads: must be at least 1"),
        ([str(tiny_llama), "--threads", "99999999"], "--threads: must be at most 4096"),
        ([str(tiny_llama), "--device", "banana"], "--device: should be auto, cpu, cuda or cuda:N, got 'banana'"),
        ([str(tiny_llama), "--device", "cuda"], "there is no CUDA device here"),
    ):
        ended = shell.run("profile", *arguments)
        assert ended.code == 2 and told in ended.err and "Traceback" not in ended.err and ended.out == ""


def test_a_table_that_could_not_be_kept_is_not_said_to_be(shell: Shell, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "muxtune").mkdir()
    (tmp_path / "muxtune" / "profiles").write_text("in the way")
    told = shell.run("profile", str(tiny_llama), "--threads", "1", XDG_CACHE_HOME=str(tmp_path))
    assert told.code == 0 and told.out.splitlines()[1].startswith("measured now, but could not be kept in ")
