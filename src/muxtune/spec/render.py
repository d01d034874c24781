"""A resolved run as text: YAML with each value's origin as a comment, or JSON with the origins beside.

The YAML is a config again: loaded from the working directory it gives the same run. Nothing is inherited in it and
every default is written out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import yaml

from muxtune.spec.load import ResolvedRun
from muxtune.spec.tree import Origin, Path

# What a null stands for, said where the config is printed.
_UNSET = {
    "memory_limit": "what the machine has",
    "threads": "as torch chooses",
    "train_on": "assistant turns, the completion, or all of a text",
    "overlong": "text is split, others are truncated",
    "chat_template": "the model's own",
    "max_length": "the smaller of the model's and 2048",
    "max_steps": "as many as num_train_epochs needs",
    "save_steps": "every epoch, and at least every 10 minutes",
    "eval_steps": "every epoch, and at the end",
    "type": "detected",
}


def render_yaml(resolved: ResolvedRun) -> str:
    """One line a value, `key: value  # origin`."""
    lines = [(text, note) for text, note in _lines(_dump(resolved), (), "", resolved)]
    width = min(max((len(text) for text, note in lines if note), default=0), 64)
    return "".join(f"{text:<{width}}  # {note}\n" if note else f"{text}\n" for text, note in lines)


def render_json(resolved: ResolvedRun) -> str:
    """`{"run": ..., "origins": {"jobs.sql.peft.r": "three.yaml:5 (defaults)", ...}}`."""
    origins = {".".join(path): str(resolved.origin(*path)) for path in _leaf_paths(_dump(resolved), ())}
    return json.dumps({"run": resolved.run.model_dump(mode="json"), "origins": origins}, indent=2)


def _dump(resolved: ResolvedRun) -> dict[str, object]:
    """The run with its jobs by name, as origins know them."""
    dumped: dict[str, object] = resolved.run.model_dump(mode="json")
    dumped["jobs"] = {job.name: job.model_dump(mode="json") for job in resolved.run.jobs}
    return dumped


def _leaf_paths(value: object, path: Path) -> Iterator[Path]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _leaf_paths(child, (*path, str(key)))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _leaf_paths(item, (*path, str(index)))
    else:
        yield path


def _lines(value: Mapping[str, object], path: Path, indent: str, resolved: ResolvedRun) -> Iterator[tuple[str, str]]:
    """(text, comment) of a mapping's entries."""
    for key, child in value.items():
        here = (*path, key)
        if isinstance(child, Mapping):
            yield f"{indent}{key}:", ""
            if here == ("jobs",):
                for name, job in child.items():
                    yield from _item(job, (*here, name), f"{indent}  ", resolved)
            else:
                yield from _lines(child, here, f"{indent}  ", resolved)
        elif isinstance(child, list) and child and isinstance(child[0], Mapping):
            yield f"{indent}{key}:", ""
            for index, item in enumerate(child):
                yield from _item(item, (*here, str(index)), f"{indent}  ", resolved)
        else:
            yield f"{indent}{key}: {_scalar(child)}", _note(key, child, resolved.origin(*here))


def _item(value: object, path: Path, indent: str, resolved: ResolvedRun) -> Iterator[tuple[str, str]]:
    """A mapping as an item of a list: its first line carries the dash."""
    assert isinstance(value, Mapping)
    inner = f"{indent}  "
    for number, (text, note) in enumerate(_lines(value, path, inner, resolved)):
        yield (f"{indent}- {text.removeprefix(inner)}" if number == 0 else text), note


def _note(key: str, value: object, origin: Origin) -> str:
    return f"{origin}: {_UNSET[key]}" if value is None and key in _UNSET else str(origin)


def _scalar(value: object) -> str:
    """A value, or a list of values, on one line of YAML.

    Text that YAML would fold or lose as it stands - line breaks, Unicode's among them - is quoted and escaped.
    """
    texts = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]
    style = None if all(item.isprintable() for item in texts) else '"'
    text: str = yaml.safe_dump(
        [value], default_flow_style=True, default_style=style, width=float("inf"), allow_unicode=style is None
    )
    return text.strip()[1:-1]
