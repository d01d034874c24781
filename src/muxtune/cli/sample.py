"""`muxtune sample`: ask an adapter - or several, and the bare base model, in one batch on one backbone."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muxtune.cli.terminal import is_fancy, print_json, printable, tell
from muxtune.errors import AdapterError, ConfigError

if TYPE_CHECKING:
    from muxtune.engine.local import LocalEngine
    from muxtune.engine.task import Task

_SHOWN = 80  # characters of an argument that is no folder


def sample(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="ADAPTER_DIR... PROMPT",
            help="Adapter folders (or runs that are not finished: their newest checkpoint), then the prompt.",
            show_default=False,
        ),
    ],
    compare: Annotated[bool, typer.Option("--compare", help="Ask all adapters, and the base model itself.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 128,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0: the likeliest token always.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", min=0.0, max=1.0)] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    base_model: Annotated[
        str | None, typer.Option("--base-model", metavar="MODEL", help="Where the adapter does not say it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print an adapter's reply to a prompt, shaped as its training data shaped prompts."""
    folders, prompt = _split(arguments, compare)
    from muxtune.engine.adapters import base_name_of

    model = base_model or base_name_of(folders[0])
    if model is None:
        raise AdapterError("it does not say its base model", where=str(folders[0]), hint="give it with --base-model")
    from muxtune.engine.local import LocalEngine

    engine = LocalEngine(model)
    tasks = [_load(engine, folder, number) for number, folder in enumerate(folders)]
    if compare:
        asked: list[Task | None] = [None, *tasks]
        replies = engine.generate(
            [(task, prompt) for task in asked],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
        _print_compared(["base model", *map(str, folders)], replies, prompt, as_json)
        return
    reply = engine.sample(
        prompt,
        task=tasks[0],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        on_text=None if as_json else _print_piece,
    )
    if as_json:
        print_json({"prompt": prompt, "adapter": str(folders[0]), "reply": reply})
    else:
        print()


def _split(arguments: Sequence[str], compare: bool) -> tuple[list[Path], str]:
    """The folders, and the prompt that comes last.

    A prompt may be any text, longer than any path: `os.path.isdir` answers false where `Path.is_dir` would raise, and
    takes the empty text for no folder.
    """
    *folders, prompt = arguments
    if not folders:
        hint = "the prompt comes last: muxtune sample runs/three/sql 'How many users are there?'"
        raise ConfigError("there should be an adapter folder and a prompt", where="sample", hint=hint)
    if not prompt.strip():
        hint = "the prompt comes last, in quotes; is a variable of the shell unset?"
        raise ConfigError("the prompt is empty", where="sample", hint=hint)
    if os.path.isdir(prompt):
        raise ConfigError("is a folder where the prompt should be", where=prompt, hint="the prompt comes last")
    if len(folders) > 1 and not compare:
        raise ConfigError(f"{len(folders)} adapters are given", where="sample", hint="ask them all with --compare")
    for folder in folders:
        if not os.path.isdir(folder):
            shown = folder if len(folder) <= _SHOWN else f"{folder[:_SHOWN]}..."
            hint = "adapter folders come first, such as runs/NAME/JOB; then the prompt, in quotes"
            raise AdapterError("this is neither an adapter folder nor a run", where=shown, hint=hint)
    return [Path(folder) for folder in folders], prompt


def _load(engine: LocalEngine, folder: Path, number: int) -> Task:
    task = engine.load(folder, name=f"adapter-{number}")
    if task.step:
        tell(f"{folder} is not finished: this is its checkpoint at step {task.step}")
    return task


def _print_piece(text: str) -> None:
    sys.stdout.write(printable(text) if is_fancy(sys.stdout) else text)
    sys.stdout.flush()


def _print_compared(labels: Sequence[str], replies: Sequence[str], prompt: str, as_json: bool) -> None:
    if as_json:
        rows = [{"adapter": label, "reply": reply} for label, reply in zip(labels, replies, strict=True)]
        rows[0]["adapter"] = ""
        print_json({"prompt": prompt, "replies": [{**row, "adapter": row["adapter"] or None} for row in rows]})
        return
    for label, reply in zip(labels, replies, strict=True):
        print(f"{label}:")
        _print_piece(reply + "\n\n")
