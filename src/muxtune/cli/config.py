"""`muxtune config print`: the run that a config file describes, every value written out with its origin."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from muxtune.cli.train import ConfigFile, Sets

app = typer.Typer(help="Look at config files.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def group() -> None:
    """One command alone would take the group's name; a callback keeps `print`."""


@app.command("print")
def print_config(
    config: ConfigFile, sets: Sets = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Print the resolved config: nothing inherited, every default written out, each value's origin beside it."""
    from muxtune.spec.load import load_run
    from muxtune.spec.render import render_json, render_yaml

    resolved = load_run(config, sets or ())
    sys.stdout.write(render_json(resolved) + "\n" if as_json else render_yaml(resolved))
