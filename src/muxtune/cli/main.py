"""The command line `muxtune`: which command is which, and how each ends.

Commands live in modules of their own and import what they need when they run, so `--help` loads neither torch nor
tokenizers nor rich. Exit status: 0 done, 1 a job failed or a check said no, 2 usage, config or data, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version as version_of
from typing import Annotated

import typer

from muxtune.cli import config, data, doctor, export, models, plan, profile, sample, trace, train
from muxtune.cli.errors import USAGE, print_bug, print_error
from muxtune.cli.rank_place import end_process
from muxtune.cli.terminal import flush_stdout, prepare_streams, tell
from muxtune.errors import MuxTuneError, RankError

_BROKEN_PIPE = 141  # what a shell reports of a process that SIGPIPE ended

app = typer.Typer(
    name="muxtune",
    help="Train many PEFT adapters at once on one frozen base model, each exactly as if it were alone.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(train.train)
app.command()(plan.plan)
app.command()(sample.sample)
app.command()(export.export)
app.command()(trace.trace)
app.command()(profile.profile)
app.command()(doctor.doctor)
app.command()(doctor.version)
for name, group in (("data", data.app), ("config", config.app), ("models", models.app)):
    app.add_typer(group, name=name)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"muxtune {version_of('muxtune')}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of every error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command. `run` takes --debug out by itself, wherever it stands."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and exit with its status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    end_process(run(arguments), os.environ)


def run(arguments: Sequence[str]) -> int:
    """The exit status of a command line."""
    prepare_streams()
    arguments, debug = _without_debug(arguments)
    try:
        status = _command(arguments)
    except MuxTuneError as error:
        if debug:
            print_bug(error, debug=True)
        print_error(error)
        status = 1 if isinstance(error, RankError) else USAGE
    except BrokenPipeError:
        status = _BROKEN_PIPE
    except OSError as error:  # a disk that is full, a folder that may not be written
        if debug:
            print_bug(error, debug=True)
        tell(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        status = 1
    except Exception as error:
        print_bug(error, debug=debug)
        status = 1
    return status if flush_stdout() else _BROKEN_PIPE


def _without_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The command line without --debug, and whether it was there: before or after the command, not after `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [one for one in arguments[:end] if one != "--debug"]
    return [*kept, *arguments[end:]], len(kept) < end


def _command(arguments: Sequence[str]) -> int:
    """Usage errors are printed and counted by typer, which ends everything with SystemExit."""
    try:
        app(list(arguments), prog_name="muxtune")
    except SystemExit as ended:
        if isinstance(getattr(ended.__context__, "__cause__", None), KeyboardInterrupt):  # typer makes a status of it
            return _stopped()
        return ended.code if isinstance(ended.code, int) else 0
    except KeyboardInterrupt:
        return _stopped()
    return 0


def _stopped() -> int:
    """Of a command that had nothing to save yet."""
    tell("stopped")
    return train.INTERRUPTED


if __name__ == "__main__":
    main()
