"""`muxtune data check | preview`: what a data file holds, and what a model will see of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from muxtune.cli.errors import USAGE
from muxtune.cli.terminal import console, print_json, tell

if TYPE_CHECKING:
    from muxtune.data.prepare import Preparer
    from muxtune.data.preview import Preview
    from muxtune.spec.dataset import Dataset
    from muxtune.spec.job import JobSpec

app = typer.Typer(help="Look at training data.", no_args_is_help=True, rich_markup_mode=None)

DataFile = Annotated[str, typer.Argument(metavar="FILE", help="A .jsonl or .json file.", show_default=False)]
Shape = Annotated[
    str | None,
    typer.Option("--type", metavar="SHAPE", help="messages, prompt_completion, alpaca, sharegpt, text or preference."),
]
BaseModel = Annotated[
    str | None, typer.Option("--base-model", metavar="MODEL", help="Whose tokenizer and chat template to use.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def check(file: DataFile, shape: Shape = None, base_model: BaseModel = None, as_json: AsJson = False) -> None:
    """Read a whole file and say what is wrong with it, by line. With a base model, judge tokens and lengths too."""
    from muxtune.data.check import check_file
    from muxtune.data.dataset import Selection, job_renderer

    job = _job_of(file, shape)
    declared = job.datasets[0].type
    if base_model is None:
        report = check_file(file, declared)
    else:
        preparer = _preparer(base_model)
        with job_renderer(job, preparer.tokenizer, now=datetime.now(UTC)) as renderer:
            selection = Selection(preparer.max_length(job))
            report = check_file(file, declared, renderer=renderer, selection=selection)
    if as_json:
        print_json(report.to_json())
    else:
        print("\n".join(report.lines()))
    raise typer.Exit(0 if report.ok else USAGE)


@app.command()
def preview(
    file: DataFile,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many examples.")] = 2,
    shape: Shape = None,
    base_model: BaseModel = None,
    config: Annotated[
        str | None, typer.Option("--config", metavar="CONFIG", help="Show the file as a job of this config reads it.")
    ] = None,
    job_name: Annotated[str | None, typer.Option("--job", metavar="NAME", help="Which job of the config.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a model will see of the first examples, with the trained tokens marked."""
    if job_name is not None and config is None:
        raise typer.BadParameter("--job names a job of --config")
    from muxtune.data.dataset import job_renderer
    from muxtune.data.preview import preview as previews_of
    from muxtune.data.preview import show
    from muxtune.data.reader import ExampleReader
    from muxtune.models.sources import EMBEDDED

    if config is None:
        job, model = _job_of(file, shape), base_model or EMBEDDED
    else:
        job, named = _configured(config, job_name, file, shape)
        model = base_model or named
    reader = ExampleReader(file, _dataset_of(job, file).type)
    examples = [record.example for record in islice(reader, count)]
    if not examples:
        reader.finish()
    if reader.problems:
        tell(f"bad lines are left out here; `muxtune data check {file}` names them")
    preparer = _preparer(model)
    with job_renderer(job, preparer.tokenizer, now=datetime.now(UTC)) as renderer:
        previews = previews_of(renderer, examples, max_length=preparer.max_length(job), overlong=job.overlong)
    if as_json:
        print_json([_as_json(one) for one in previews])
    else:
        show(previews, console(sys.stdout))


def _job_of(file: str, shape: str | None) -> JobSpec:
    """A job that reads the file as a config without further keys would."""
    from muxtune.spec.dataset import Dataset
    from muxtune.spec.job import JobSpec

    data = Dataset(path=file, type=shape)
    return JobSpec(name="data", method="dpo" if data.type == "preference" else "sft", datasets=(data,))


def _configured(config: str, name: str | None, file: str, shape: str | None) -> tuple[JobSpec, str]:
    """The job of the config that is named, or that reads the file, or else the first; and the run's base model."""
    from muxtune.errors import ConfigError
    from muxtune.spec.dataset import Dataset
    from muxtune.spec.load import load_run

    run = load_run(config).run
    if name is None:
        reading = (job for job in run.jobs if any(_same_file(data.path, file) for data in job.datasets))
        job = next(reading, run.jobs[0])
    else:
        try:
            job = run.job(name)
        except KeyError:
            names = ", ".join(job.name for job in run.jobs)
            raise ConfigError("there is no such job", where=f"--job {name}", hint=f"jobs: {names}") from None
    if shape is not None:
        job = job.model_copy(update={"datasets": (Dataset(path=file, type=shape),)})  # whatever the job's method
    return job, run.base_model


def _dataset_of(job: JobSpec, file: str) -> Dataset:
    """The job's data set of that file; its first where it does not read it."""
    return next((data for data in job.datasets if _same_file(data.path, file)), job.datasets[0])


def _same_file(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _preparer(base_model: str) -> Preparer:
    from muxtune.data.prepare import Preparer
    from muxtune.models.sources import resolve

    return Preparer(resolve(base_model).path)


def _as_json(preview: Preview) -> dict[str, object]:
    problem = preview.problem
    pieces: Sequence[dict[str, object]] = [{"text": piece.text, "trained": piece.trained} for piece in preview.pieces]
    return {
        "where": preview.where,
        "tokens": preview.tokens,
        "trained_tokens": preview.trained_tokens,
        "pieces": pieces,
        "note": preview.note,
        "problem": {"code": problem.code, "message": problem.message} if problem else None,
    }
