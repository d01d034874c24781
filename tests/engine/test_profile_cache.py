"""Kept operator tables: one for a set of shapes and a machine, found again, private, and made anew where damaged."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from time import sleep

import pytest
import torch

from muxtune.engine.load import load_backbone
from muxtune.engine.profile_cache import FOLDER, KeptTable, find_table, kept_table, key_of
from muxtune.models.backbone import Backbone
from muxtune.models.sources import resolve
from muxtune.plan.profile import OperatorTable, from_json
from tests.engine.build import backbone_of
from tests.plan.tables import table
from tests.tiny import tiny_folder


class Measuring:
    """Stands in for the profiler, and counts."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, backbone: Backbone, *, model: str) -> OperatorTable:
        self.times += 1
        return replace(table(), model=model, layers=self.times)


def _kept(backbone: Backbone, folder: Path, measuring: Measuring, *, fresh: bool = False) -> KeptTable:
    return kept_table(
        backbone, folder, fresh=fresh, model="tiny", measuring=measuring, now=lambda: 1e9 + measuring.times
    )


def test_a_table_is_measured_once_for_all_models_of_the_same_shapes(tmp_path: Path) -> None:
    measuring = Measuring()
    one, other = (_kept(backbone_of(), tmp_path, measuring) for _ in range(2))
    assert (one.fresh, other.fresh, measuring.times) == (True, False, 1)
    assert one.table == other.table and one.path == other.path and one.table.model == "tiny"
    assert one.table.measured_at_s == 1e9 + 1
    again = _kept(backbone_of(), tmp_path, measuring, fresh=True)
    assert again.fresh and again.table.layers == 2 == _kept(backbone_of(), tmp_path, measuring).table.layers


def test_whatever_changes_what_is_measured_has_a_table_of_its_own() -> None:
    threads = torch.get_num_threads()
    keys = {key_of(backbone_of()), key_of(backbone_of("llama-mqa")), key_of(backbone_of(layers=3))}
    keys.add(key_of(backbone_of(dtype=torch.float64)))
    keys.add(key_of(backbone_of(block="transformers")))
    torch.set_num_threads(threads + 1)
    try:
        keys.add(key_of(backbone_of()))
    finally:
        torch.set_num_threads(threads)
    assert len(keys) == 6
    assert key_of(backbone_of()) in keys


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2", "gpt2", "opt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_finds_the_table_of_the_model_that_is_loaded_from_it(
    tmp_path: Path, arch: str, dtype: torch.dtype
) -> None:
    """Tied weights and untied ones, in the dtype of the run and not in that of the file."""
    folder = tiny_folder(tmp_path / "model", arch)
    cpu = torch.device("cpu")
    assert find_table(folder, tmp_path, device=cpu, dtype=dtype) is None
    loaded = load_backbone(resolve(str(folder)), device="cpu", dtype="bf16" if dtype is torch.bfloat16 else "fp32")
    kept = _kept(loaded, tmp_path, Measuring())
    assert find_table(folder, tmp_path, device=cpu, dtype=dtype) == kept.table
    assert find_table(folder, tmp_path, device=cpu, dtype=torch.float64) is None
    twins = find_table(folder, tmp_path, device=cpu, dtype=dtype, block="transformers")
    assert (twins == kept.table) is (loaded.block == "transformers")


def test_a_file_is_private_and_a_damaged_one_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    measuring, backbone = Measuring(), backbone_of()
    path = _kept(backbone, tmp_path, measuring).path
    assert path.parent == tmp_path / FOLDER
    assert path.stat().st_mode & 0o077 == 0 == path.parent.stat().st_mode & 0o077
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    path.write_bytes(path.read_bytes()[:-9])
    assert _kept(backbone, tmp_path, measuring).fresh and measuring.times == 2
    assert "is damaged and is made anew" in caplog.text
    assert not _kept(backbone, tmp_path, measuring).fresh


def test_a_folder_that_cannot_be_written_costs_the_measurement_only(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    measuring = Measuring()
    found = [_kept(backbone_of(), tmp_path, measuring) for _ in range(2)]
    assert all(one.fresh and not one.kept for one in found) and measuring.times == 2


def test_who_comes_while_another_measures_waits_and_takes_what_is_kept_then(tmp_path: Path) -> None:
    measuring, backbone, said = Measuring(), backbone_of(), list[str]()
    began, go_on = Event(), Event()

    class Slow(Measuring):
        def __call__(self, backbone: Backbone, *, model: str) -> OperatorTable:
            began.set()
            assert go_on.wait(60)
            return super().__call__(backbone, model=model)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(_kept, backbone, tmp_path, Slow())
        assert began.wait(60)
        second = pool.submit(kept_table, backbone, tmp_path, measuring=measuring, notice=said.append)
        sleep(0.2)
        assert not second.done() and said == ["waiting for another process, which measures what operators cost here"]
        go_on.set()
        assert first.result(60).fresh and second.result(60).table == first.result().table
    assert measuring.times == 0 and said[1:] == [""]


def test_what_is_kept_is_what_was_measured(tmp_path: Path) -> None:
    found = kept_table(backbone_of(), tmp_path, model="tiny").table
    assert found.model == "tiny" and from_json(found.to_json()) == found == kept_table(backbone_of(), tmp_path).table
