"""`muxtune models list | pull | export`: the base models that are here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from muxtune.cli.terminal import console, grid, print_json

app = typer.Typer(help="Base models on this machine.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[
    str, typer.Argument(metavar="MODEL", help="An alias, a folder, a .gguf file or a hub name.", show_default=False)
]


@app.command("list")
def list_all(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """The embedded model and what the cache holds. Folders of yours and hub names work without being listed."""
    from muxtune.models.sources import list_models

    found = list_models()
    if as_json:
        rows = [
            {
                "name": model.name,
                "public_name": model.public_name,
                "note": model.note,
                "path": str(model.path) if model.path else None,
                "size_bytes": model.size_bytes,
            }
            for model in found
        ]
        print_json(rows)
        return
    table = grid("name", "size")
    for heading in ("is", "note", "folder"):
        table.add_column(heading, no_wrap=True)
    for model in found:
        size = f"{model.size_bytes / 1e6:.0f} MB" if model.path else "-"
        table.add_row(model.name, size, model.public_name, model.note, str(model.path or "not converted yet: pull it"))
    console(sys.stdout).print(table, soft_wrap=True)


@app.command()
def pull(name: Name) -> None:
    """Convert the embedded model, or download the newest version of a hub model. Prints its folder."""
    from muxtune.models.sources import pull as pull_model

    print(pull_model(name).path)


@app.command()
def export(
    name: Name, dest: Annotated[Path, typer.Argument(metavar="DEST", help="A new folder.", show_default=False)]
) -> None:
    """Write the weights that adapters are trained on here as a model folder that other tools load."""
    from muxtune.models.sources import export as export_model

    print(export_model(name, dest))
