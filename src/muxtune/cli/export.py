"""`muxtune export`: an adapter for other tools - alone in peft's format, or merged into its base model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muxtune.errors import AdapterError

if TYPE_CHECKING:
    from muxtune.models.memory import Footprint
    from muxtune.models.sources import ModelFolder


class Format(StrEnum):
    PEFT = "peft"
    MERGED = "merged"


class Checker(StrEnum):
    VLLM = "vllm"


def export(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="An adapter folder, a run or a checkpoint of one.", show_default=False),
    ],
    form: Annotated[
        Format, typer.Option("--format", help="peft: the adapter alone. merged: a model folder.")
    ] = Format.PEFT,
    out: Annotated[Path | None, typer.Option("--out", metavar="DEST", help="A new folder.")] = None,
    base_name: Annotated[
        str | None, typer.Option("--base-name", metavar="NAME", help="What the export calls its base model.")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option("--base-model", metavar="MODEL", help="Where the adapter does not say it.")
    ] = None,
    check: Annotated[
        Checker | None, typer.Option("--check", help="Would this server load it? Exit 1 if it would not.")
    ] = None,
) -> None:
    """Write an adapter as other tools want it. A finished folder is in peft's format already: --check needs no copy."""
    if form is Format.MERGED and (out is None or check is not None or base_name is not None):
        raise typer.BadParameter("--format merged needs --out, and takes neither --check nor --base-name")
    from muxtune.engine.adapters import is_finished

    if form is Format.MERGED:
        assert out is not None
        _merge(folder, out, base_model)
        return
    if out is None:
        if not is_finished(folder) or check is None or base_name is not None:
            raise typer.BadParameter("where to? Give --out DEST (a finished folder can do with --check vllm alone)")
    else:
        _copy(folder, out, base_name, base_model)
        print(out)
    if check is not None:
        raise typer.Exit(_check(out or folder, _base(folder, base_model)))


def _copy(folder: Path, out: Path, base_name: str | None, base_model: str | None) -> None:
    from muxtune.engine.adapters import is_finished
    from muxtune.peft.copy import copy_adapter

    if is_finished(folder):
        copy_adapter(folder, out, base_name=base_name)
    else:
        _export_checkpoint(folder, out, _base(folder, base_model), base_name)


def _merge(folder: Path, out: Path, base_model: str | None) -> None:
    from muxtune.engine.merge import merge_adapter
    from muxtune.peft.folder import writing

    base = _base(folder, base_model)
    with _finished(folder, base) as adapter, writing(out):
        report = merge_adapter(adapter, base, out)
    print(out)
    note = f" ({base.note})" if base.note else ""
    print(f"{report.changed_tensors} weights of {base.public_name}{note} changed")
    print(
        f"its logits differ from base + adapter by {report.difference:.2g}; the adapter moves them {report.effect:.2g}"
    )


def _check(folder: Path, base: ModelFolder) -> int:
    """0 where vLLM would load and use the adapter, else 1."""
    from muxtune.peft.check_vllm import check_vllm

    report = check_vllm(folder, _footprint(base).linears)
    for problem in report.problems:
        print(f"vLLM: {problem}")
    if report.ok:
        print(f"vLLM: would load it. Start it with {' '.join(report.flags)}")
    return 0 if report.ok else 1


@contextmanager
def _finished(folder: Path, base: ModelFolder) -> Iterator[Path]:
    """The adapter as a finished folder: itself, or a passing export of a checkpoint."""
    import tempfile

    from muxtune.engine.adapters import is_finished

    if is_finished(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="muxtune-") as scratch:
        adapter = Path(scratch) / "adapter"
        _export_checkpoint(folder, adapter, base, None)
        yield adapter


def _export_checkpoint(folder: Path, dest: Path, base: ModelFolder, base_name: str | None) -> None:
    from muxtune.cli.terminal import tell
    from muxtune.engine.adapters import name_of
    from muxtune.engine.local import LocalEngine
    from muxtune.peft.folder import require_free, writing

    with writing(dest):
        require_free(dest)
    engine = LocalEngine(base)
    task = engine.load(folder, name=name_of(folder))
    tell(f"{folder} is not finished: this is its checkpoint at step {task.step}")
    engine.save(task, dest, base_name=base_name)


def _base(folder: Path, base_model: str | None) -> ModelFolder:
    from muxtune.engine.adapters import base_name_of
    from muxtune.models.sources import resolve

    name = base_model or base_name_of(folder)
    if name is None:
        raise AdapterError("it does not say its base model", where=str(folder), hint="give it with --base-model")
    return resolve(name)


def _footprint(base: ModelFolder) -> Footprint:
    import torch

    from muxtune.models.memory import footprint

    return footprint(base.path, torch.float32)
