"""Adapters on disk, for answering: finished folders - ours, or any LoRA of peft's - and runs that are not finished.

    DIR with adapter_config.json             the finished adapter
    DIR with job.json, or a step-N of its    the newest (or that) whole checkpoint
    checkpoints

A finished folder of ours says in its manifest how its prompts look and where a reply ends; one of another tool speaks
the base model's chat template. A checkpoint holds neither, so the job's data is asked again (from the token cache).
Everything is read as untrusted input, and refused where it was trained on other base weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from torch import Tensor

from muxtune.data.manifest import PromptFormat
from muxtune.data.prepare import PreparedJob, Preparer
from muxtune.data.render import Renderer
from muxtune.data.types import Shape
from muxtune.engine import checkpoint
from muxtune.engine.checkpoint import Checkpoint
from muxtune.engine.task_folder import CHECKPOINTS, JOB, STATUS, read_origin, status_of
from muxtune.errors import AdapterError, CheckpointError
from muxtune.models.sources import ModelFolder, list_models
from muxtune.peft import registry
from muxtune.peft.base import BackboneView
from muxtune.peft.folder import CONFIG_FILE, TEMPLATE_FILE, read_config, read_manifest
from muxtune.peft.stored import StoredAdapter
from muxtune.spec.job import JobSpec
from muxtune.spec.status import JobStatus

_STEP = re.compile(r"step-[0-9]{8}")
_MAX_TEMPLATE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Voice:
    """How prompts are written for an adapter, and where its replies end."""

    renderer: Renderer
    form: PromptFormat


@dataclass(frozen=True, slots=True)
class AnsweringAdapter:
    """An adapter that was read. `prepared` and `step` are of a checkpoint, None and 0 of a finished folder."""

    job: JobSpec
    values: Mapping[str, Tensor]  # by parameter name
    voice: Voice
    prepared: PreparedJob | None = None
    step: int = 0


def is_finished(path: Path) -> bool:
    """Whether `path` is an adapter folder as peft knows it. A run that goes on beyond an earlier end is not."""
    goes_on = os.path.exists(path / STATUS) and status_of(path) != JobStatus.COMPLETED
    return os.path.exists(path / CONFIG_FILE) and not goes_on


def require_adapter(path: Path) -> None:
    """Raises AdapterError where `path` is no adapter's folder, before anything is loaded; whether it fits shows then.

    A run without an adapter and a checkpoint answer, and are exported, but training starts from adapters only, whose
    values stay what they are.
    """
    run = _around(path)
    if os.path.exists(path / CONFIG_FILE) or not os.path.exists(run / JOB):
        read_config(path)
        return
    what = "a run that is not finished" if run == path else "a checkpoint"
    raise AdapterError(
        f"this is {what}, not an adapter folder",
        where=str(path),
        hint=f"make one with `muxtune export {path} --out DIR`, and give DIR",
    )


def name_of(path: Path) -> str:
    """The name of the job whose run, or a checkpoint of whose run, is at `path`."""
    return read_origin(_run_of(path)).job.name


def base_name_of(path: Path, *, cache_dir: Path | None = None) -> str | None:
    """The base model that an adapter says it belongs to, by the name it resolves under here; None where it is unsaid.

    Raises AdapterError or CheckpointError where `path` holds no adapter.
    """
    if not is_finished(path):
        return read_origin(_run_of(path)).base_model or None
    if (path / JOB).exists() and (base_model := read_origin(path).base_model):
        return base_model
    manifest = read_manifest(path)
    named = manifest.base.name if manifest else read_config(path).get("base_model_name_or_path")
    known = {model.public_name: model.name for model in list_models(cache_dir=cache_dir)}
    return known.get(named, named) if isinstance(named, str) else None


def read_stored(
    path: Path, name: str, *, base: ModelFolder, view: BackboneView, preparer: Preparer
) -> AnsweringAdapter:
    """The adapter at `path`, as a task called `name` may carry it.

    Raises AdapterError, CheckpointError: nothing there, damaged, unsafe, or of other base weights. DataError: the data
    of an unfinished run, which says how its prompts look, is gone.
    """
    if is_finished(path):
        return _finished(path, name, base, view, preparer)
    return _checkpoint(path, name, base, preparer)


def _finished(path: Path, name: str, base: ModelFolder, view: BackboneView, preparer: Preparer) -> AnsweringAdapter:
    stored = registry.read_stored(path, view, base_sha256=base.weights_sha256)
    # The job of a task that only answers: its data stand for what is never read.
    job = JobSpec(name=name, datasets=(str(path),), peft=stored.spec)
    return AnsweringAdapter(job, stored.values, _voice(path, stored, preparer))


def _voice(path: Path, loaded: StoredAdapter, preparer: Preparer) -> Voice:
    renderer = Renderer(preparer.tokenizer, template=_template(path), now=datetime.now(UTC))
    if loaded.manifest is not None:
        return Voice(renderer, loaded.manifest.prompt)
    return base_voice(renderer)


def base_voice(renderer: Renderer) -> Voice:
    """How the bare base model is spoken to: in its chat template, or in plain text where it has none."""
    shape: Shape = "messages" if renderer.template_source is not None else "text"
    return Voice(renderer, PromptFormat(shape, None, renderer.eos_ids))


def _template(path: Path) -> str | None:
    """The folder's own chat template, which the sandbox renders like any stranger's."""
    file = path / TEMPLATE_FILE
    if not file.exists() and not file.is_symlink():
        return None
    if file.is_symlink() or file.stat().st_size > _MAX_TEMPLATE_BYTES:
        raise AdapterError("a link, or too large for a chat template", where=str(file))
    return file.read_text(encoding="utf-8", errors="replace")


def _checkpoint(path: Path, name: str, base: ModelFolder, preparer: Preparer) -> AnsweringAdapter:
    origin = read_origin(_run_of(path))
    found = _whole(path)
    if found.state.ground.base != base.weights_sha256:
        raise CheckpointError(
            "was trained on other base weights", where=str(found.path), hint="give its base model with --base-model"
        )
    prepared = preparer.prepare(origin.job, created=origin.created)
    job = origin.job.model_copy(update={"name": name})
    voice = Voice(prepared.renderer, prepared.prompt_format)
    return AnsweringAdapter(job, found.parameters, voice, prepared, found.state.step)


def _run_of(path: Path) -> Path:
    """The run that `path` is, or is a checkpoint of."""
    run = _around(path)
    if not os.path.exists(run / JOB):  # no path at all, one too long say, is none that exists
        raise AdapterError(
            "this is neither an adapter folder nor a run",
            where=str(path),
            hint=f"give a folder that holds {CONFIG_FILE} or {JOB}, such as runs/NAME/JOB",
        )
    return run


def _around(path: Path) -> Path:
    """The run that a checkpoint at `path` is of; `path` itself where it is none."""
    return path.parent.parent if _STEP.fullmatch(path.name) and path.parent.name == CHECKPOINTS else path


def _whole(path: Path) -> Checkpoint:
    """The checkpoint at `path`, or the newest of the run at `path`."""
    if path != _run_of(path):
        return checkpoint.read(path)
    found = checkpoint.newest(path / CHECKPOINTS)
    if found is None:
        raise CheckpointError("has no checkpoint yet", where=str(path), hint="wait for its first, or train it")
    return found
