"""`muxtune train`: the composition point of a run on this machine.

    config -> RunSpec -> TrainingRun -> events -> view -> table or lines, summary, exit status

0: every job is completed. 1: one has failed. 2: the config, the data or a folder is wrong and nothing was trained.
130: stopped by a signal.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muxtune.cli.errors import print_error
from muxtune.errors import ConfigError, MuxTuneError

if TYPE_CHECKING:
    from muxtune.cli.interrupt import StopSignal
    from muxtune.cli.progress import Progress
    from muxtune.cli.view import RunView
    from muxtune.engine.training import TrainingRun
    from muxtune.spec.run import RunSpec

ConfigFile = Annotated[str, typer.Argument(metavar="CONFIG", help="The YAML file of the run.", show_default=False)]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of every job, or jobs.NAME.KEY of one."),
]
INTERRUPTED = 130
RANK_TIMEOUT_S = 300.0
_RANKS, _RANKS_A_CORE = 8, 2  # that may be started on one machine
_STOPPING = "stopping at the end of this step; Ctrl-C again stops at once"
_ENDING = "stopping; nothing is being trained yet"


def train(
    config: ConfigFile,
    sets: Sets = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all but what only the loaded base model shows; train nothing.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue what is unfinished.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start over in folders that hold a run.")] = False,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Let a job that cannot start fail alone.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: JSON.")] = False,
    tp: Annotated[
        int | None, typer.Option("--tp", min=1, help="Split each layer over so many processes.", show_default=False)
    ] = None,
    pp: Annotated[
        int | None, typer.Option("--pp", min=1, help="Split the layers into so many stages.", show_default=False)
    ] = None,
    rank_timeout: Annotated[
        float,
        typer.Option(
            "--rank-timeout", min=1, metavar="SECONDS", help="How long a rank may be silent before it is lost."
        ),
    ] = RANK_TIMEOUT_S,
) -> None:
    """Train every job of a config file together on one base model. Ctrl-C saves and stops; --resume goes on."""
    if resume and overwrite:
        raise typer.BadParameter("--resume continues a run, --overwrite deletes it: choose one")
    if as_json and not dry_run:
        raise typer.BadParameter("--json belongs to --dry-run; a run writes metrics.jsonl")
    from muxtune.cli.rank_place import begin_as, rank_place
    from muxtune.parallel.layout import layout_of
    from muxtune.spec.load import load_run

    place = rank_place(os.environ)
    if place is not None:
        begin_as(place, os.environ)
    sets = [*(sets or ()), *(f"{key}={number}" for key, number in (("tp", tp), ("pp", pp)) if number is not None)]
    resolved = load_run(config, sets)
    layout = layout_of(resolved.run.tp, resolved.run.pp, place.size if place is not None else None)
    switches = {"--resume": resume, "--overwrite": overwrite, "--keep-going": keep_going}
    again = [config, *(f"--set={one}" for one in sets), *(["--keep-going"] if keep_going else [])]
    if place is None and layout.size > 1 and not dry_run:
        raise typer.Exit(_start(layout.size, config, sets, switches, resolved.run, rank_timeout))
    run = resolved.run.model_copy(update={"tp": layout.tp, "pp": layout.pp})
    if place is not None and place.rank:
        from muxtune.cli.rank import follow

        raise typer.Exit(0 if dry_run else follow(place, run, rank_timeout))
    from muxtune.engine.training import TrainingRun

    training = TrainingRun(run, resume=resume, overwrite=overwrite, keep_going=keep_going, locate=resolved.locate)
    if dry_run:
        from muxtune.cli.dry_run import print_dry_run

        raise typer.Exit(print_dry_run(training, as_json=as_json))
    if place is None:
        raise typer.Exit(_train(training, again))
    from muxtune.cli.rank import leading

    with leading(place, run, layout, rank_timeout) as training.ranks:
        raise typer.Exit(_train(training, again))


def _start(
    size: int, config: str, sets: Sequence[str], switches: Mapping[str, bool], run: RunSpec, timeout_s: float
) -> int:
    """Have as many ranks carry out the same command. Raises ConfigError for more than this machine should start."""
    from muxtune.cli.starter import Starter

    cores = os.cpu_count() or 1
    if size > max(_RANKS, cores * _RANKS_A_CORE):
        raise ConfigError(
            f"{size} ranks are too many for a machine with {cores} core{'s' * (cores > 1)}: each is a process",
            where="tp, pp",
            hint="fewer ranks, or more machines, with torchrun: docs/distributed.md",
        )
    arguments = ["train", config, *(f"--set={one}" for one in sets), f"--rank-timeout={timeout_s:g}"]
    arguments += [name for name, given in switches.items() if given]
    return Starter(size, arguments, Path(run.output_dir), timeout_s).run(os.environ)


def _train(training: TrainingRun, arguments: Sequence[str]) -> int:
    from muxtune.cli.interrupt import StopSignal
    from muxtune.cli.progress import progress_of
    from muxtune.cli.summary import ending, print_summary
    from muxtune.cli.terminal import tell
    from muxtune.cli.view import RunView

    view = RunView(training.run.jobs)
    error: MuxTuneError | None = None
    with (
        progress_of(view) as progress,
        StopSignal(lambda graceful: progress.say(_STOPPING if graceful else _ENDING)) as stop,
    ):
        training.stop, training.notice = stop, progress.say
        insisted = False
        try:
            _listen(training, view, progress, stop)
        except KeyboardInterrupt:
            insisted = True
        except MuxTuneError as caught:
            if not view.began:
                raise
            error = caught
    for failure in training.failures:
        print_error(failure.named)
    if error is not None:
        print_error(error)
    if view.began or not insisted:
        print_summary(view, training.run.output_dir)
    if insisted or (stop.requested and not all(task.ended for task in view.tasks.values())):
        tell(_how_to_resume(insisted, view.began, arguments))
        return INTERRUPTED
    tell(ending(view))
    return 1 if error is not None or view.with_state("failed") else 0


def _listen(training: TrainingRun, view: RunView, progress: Progress, stop: StopSignal) -> None:
    for event in training.events():
        view.hear(event)
        progress.hear(event)
        stop.graceful = stop.graceful or view.began


def _how_to_resume(insisted: bool, began: bool, arguments: Sequence[str]) -> str:
    if not began:
        return "stopped; nothing was trained"
    saved = "stopped at once; the newest checkpoints stay" if insisted else "stopped; every task is saved"
    return f"{saved}. Continue with: muxtune train {shlex.join(arguments)} --resume"
