"""From a model's folder and a job to the job's tokens and the way its prompts are written; no weights are needed.

The boundary: it reads the tokenizer, two numbers of `config.json` and the job's files. `PreparedJob` keeps the renderer
because sampling must shape a prompt exactly as training shaped it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from muxtune.data.cache import TokenCache
from muxtune.data.dataset import TaskData, build, job_renderer
from muxtune.data.manifest import DatasetRecord, PromptFormat
from muxtune.data.render import Renderer
from muxtune.data.tokenizer import TextTokenizer
from muxtune.data.types import Message
from muxtune.errors import ConfigError
from muxtune.spec.job import JobSpec
from muxtune.spec.schedule import lr_at, total_steps, warmup_steps

DEFAULT_MAX_LENGTH = 2048
MIN_LENGTH = 2  # a token of context, and one to predict


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job with its data read. `created` is what `strftime_now` answered while its templates rendered."""

    job: JobSpec
    data: TaskData
    renderer: Renderer
    created: datetime

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user may not have wanted: of the data, and of the schedule that follows from their number."""
        total = total_steps(self.job, self.data.groups)
        warmup = warmup_steps(self.job, total)
        if warmup < total or not self.job.warmup_steps:
            return self.data.report.warnings
        reached = lr_at(self.job, total - 1, total)
        return (
            *self.data.report.warnings,
            f"warmup_steps {warmup} is not less than the {total} steps of the job: its learning rate only rises, to "
            f"{reached:.2g} of {self.job.learning_rate:g}",
        )

    @property
    def prompt_format(self) -> PromptFormat:
        return PromptFormat(self.data.prompt_shape, self.data.system, self.renderer.eos_ids)

    @property
    def datasets(self) -> tuple[DatasetRecord, ...]:
        return tuple(DatasetRecord(Path(file.path).name, file.sha256, file.examples) for file in self.data.report.files)


class Preparer:
    """Prepares jobs for one base model. `cache_dir` None: no token cache."""

    def __init__(self, model_folder: Path, *, cache_dir: Path | None = None) -> None:
        self.tokenizer = TextTokenizer.from_folder(model_folder)
        self.max_positions = _max_positions(model_folder)
        self._cache = TokenCache(cache_dir) if cache_dir is not None else None

    def prepare(self, job: JobSpec, *, created: datetime) -> PreparedJob:
        """Read, check and tokenise all data of `job`. Raises DataError, ConfigError for a max_length out of range."""
        renderer = job_renderer(job, self.tokenizer, now=created)
        try:
            data = build(job, renderer, max_length=self.max_length(job), cache=self._cache)
        finally:
            renderer.close()
        return PreparedJob(job, data, renderer, created)

    def max_length(self, job: JobSpec) -> int:
        """The job's own, or the smaller of 2048 and what the model leaves beside the adapter's virtual tokens."""
        if self.max_positions is None:
            return job.max_length or DEFAULT_MAX_LENGTH
        limit, beside = self.max_positions - job.peft.lead, ""
        if job.peft.lead:
            beside = f" beside {job.peft.lead} virtual tokens"
        if limit < MIN_LENGTH:
            raise ConfigError(
                f"the {self.max_positions} positions of the base model leave no room{beside}",
                where=f"jobs.{job.name}.peft.num_virtual_tokens",
            )
        if job.max_length is not None and job.max_length > limit:
            raise ConfigError(
                f"{job.max_length} is more than the {self.max_positions} positions of the base model{beside}",
                where=f"jobs.{job.name}.max_length",
                hint=f"at most {limit}",
            )
        return job.max_length or min(DEFAULT_MAX_LENGTH, limit)


def prompt_ids(renderer: Renderer, form: PromptFormat, prompt: str | Sequence[Message]) -> npt.NDArray[np.int32]:
    """A prompt as its adapter's training data wrote prompts: a chat turn after the common system message, or bare text.

    A conversation is rendered as it stands; the system message is put before it where it brings none.
    """
    chat = form.shape in ("messages", "alpaca", "sharegpt")
    if isinstance(prompt, str):
        if not chat:
            return renderer.prompt_ids(prompt)
        prompt = [Message("user", prompt)]
    messages = list(prompt)
    if form.system is not None and not any(message.role == "system" for message in messages):
        messages.insert(0, Message("system", form.system))
    return renderer.render_prompt(messages)


def _max_positions(model_folder: Path) -> int | None:
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    for key in ("max_position_embeddings", "n_positions"):
        if isinstance(config.get(key), int):
            return int(config[key])
    return None
