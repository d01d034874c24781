"""`muxtune.Engine`: the engine of one process, from the name of a base model to adapter folders.

It composes what the command line composes too - a checked model folder, its tokenizer, a probed backbone - and adds the
text side to the engine: data files in, sampled text and peft folders out.

    engine = Engine("smollm2-135m-instruct")
    task = engine.attach(Job(name="sql", datasets=["sql.jsonl"], max_steps=24))
    for result in engine.run():
        print(result.task, result.step, result.loss)
    print(engine.sample("How many users are there?", task=task))
    engine.save(task, "out/sql")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from muxtune.data.manifest import BaseIdentity, TrainingManifest
from muxtune.data.prepare import PreparedJob, Preparer, prompt_ids
from muxtune.data.render import Renderer
from muxtune.engine.adapters import Voice, base_voice, read_stored, require_adapter
from muxtune.engine.arguments import (
    Prompt,
    as_block,
    as_count,
    as_device,
    as_dtype,
    as_job,
    as_number,
    as_path,
    as_prompt,
    as_requests,
    as_threads,
)
from muxtune.engine.engine import DEFAULT_FUSE_TOKENS, Engine
from muxtune.engine.load import DTypeName, load_backbone
from muxtune.engine.planning import Planning
from muxtune.engine.profile_cache import kept_table
from muxtune.engine.profiler import BUDGET_S, measure
from muxtune.engine.ranks import Ranks
from muxtune.engine.references import ReferenceCache, References, ground_of
from muxtune.engine.runner import Runner
from muxtune.engine.sampling import Request, generate
from muxtune.engine.task import Sequences, Task
from muxtune.errors import ConfigError, StateError, TaskError
from muxtune.models.backbone import Backbone, BlockChoice
from muxtune.models.cache import default_cache_dir
from muxtune.models.sources import ModelFolder, resolve
from muxtune.peft.folder import require_free, write_adapter, writing
from muxtune.peft.registry import give, payload, start_from
from muxtune.plan.memory import MemoryModel
from muxtune.plan.profile import OperatorTable
from muxtune.spec.event import StepResult, TaskEvent
from muxtune.spec.job import JobSpec
from muxtune.spec.policy import Policy

_TAKE_TURNS = 2  # hTasks whose passes overlap where ranks hold layers together: one computes, one's sums travel


class LocalEngine(Engine):
    """Args:
    base_model: an alias, a folder in Hugging Face layout, a .gguf file or a hub name.
    device, dtype: `auto` is cuda with bf16 if there, else the CPU with fp32.
    block: what runs a layer; `auto` is the fast one for the models that it knows, else transformers' own, which is also
        what `plain` has. It is part of what makes two runs equal bit for bit.
    threads: of the CPU; None as torch chooses. It is part of what makes two runs equal bit for bit.
    num_hidden_layers: keep the first layers only, for fast checks.
    policy: who runs with whom; no result depends on it. `muxtune` plans with what operators cost on this device, which
        is measured when it is first needed, and kept.
    memory: what there is to plan with; without it only `fuse_tokens` bounds a pass.
    fuse_tokens: rows that the tasks of one micro-batch may bring together; bounds the activation memory.
    recompute: as for `Engine`: less memory for more time, the same bits.
    keep_tokens: as for `Engine`: less time for more memory, the same bits.
    notice: told what takes a while, in words, and "" when that is done.
    ranks: what holds the backbone together with this process, if anything does, each on a device of its own whatever
        `device` says; each layer runs as transformers' own.
    """

    def __init__(
        self,
        base_model: str | os.PathLike[str] | ModelFolder,
        *,
        device: str = "auto",
        dtype: DTypeName = "auto",
        block: BlockChoice = "auto",
        threads: int | None = None,
        policy: Policy = "muxtune",
        memory: MemoryModel | None = None,
        num_hidden_layers: int | None = None,
        fuse_tokens: int = DEFAULT_FUSE_TOKENS,
        plain: bool = False,
        recompute: bool = False,
        keep_tokens: int = 0,
        cache_dir: Path | None = None,
        notice: Callable[[str], None] = lambda text: None,
        ranks: Ranks | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(as_threads(threads))
        device, dtype, block = as_device(device), as_dtype(dtype), as_block(block)
        if plain and block == "auto":
            block = "transformers"
        cache = cache_dir or default_cache_dir()
        if not isinstance(base_model, ModelFolder):
            name = base_model if isinstance(base_model, str) else str(as_path(base_model, "base_model"))
            base_model = resolve(name, cache_dir=cache)
        self.base = base_model
        self.preparer = Preparer(self.base.path, cache_dir=cache / "tokens")
        if ranks is None:
            backbone = load_backbone(
                self.base, device=device, dtype=dtype, num_hidden_layers=num_hidden_layers, block=block
            )
        else:
            backbone = ranks.load(self.base, dtype=dtype, layers=num_hidden_layers, threads=threads, plain=plain)
        bits = (torch.get_num_threads(), num_hidden_layers, plain, backbone.block, *([ranks.layout] if ranks else []))
        ground = ground_of(self.base.weights_sha256, backbone.dtype, backbone.device, *bits)
        table = partial(_table, backbone, cache, self.base.public_name, notice)
        super().__init__(
            backbone,
            policy=policy,
            planning=Planning(table, memory or MemoryModel(), backbone.places, recompute=recompute),
            fuse_tokens=fuse_tokens,
            plain=plain,
            recompute=recompute,
            keep_tokens=keep_tokens,
            references=References(ReferenceCache(cache / "references"), ground),
            followers=ranks,
            together=_TAKE_TURNS if ranks is not None and ranks.layout.pp == 1 else 1,
        )
        self._ranks = ranks
        if ranks is not None:
            ranks.holding(self.sharded)
        self._prepared: dict[str, PreparedJob] = {}
        self._voices: dict[str, Voice] = {}
        self._bare: Voice | None = None

    @property
    def view(self) -> Backbone:
        """The shapes and names of the whole model, as adapter folders mean them."""
        return self.backbone if self._ranks is None else self._ranks.view

    def attach(  # type: ignore[override]
        self, job: JobSpec, prepared: PreparedJob | None = None, *, chunk_tokens: int | None = None
    ) -> Task:
        """Read the job's data (unless it comes `prepared`) and start its task, from `adapter_path` where it has one.

        Raises what `Engine.attach` raises, DataError for bad data, AdapterError for a folder that does not fit.
        """
        named = as_job(job).adapter_path
        start = Path(named) if named is not None else None
        if start is not None:
            require_adapter(start)
        prepared = prepared or self.preparer.prepare(job, created=datetime.now(UTC))
        sequences = Sequences(prepared.data.train, prepared.data.validation)
        task = super().attach(job, sequences, chunk_tokens=chunk_tokens)
        self._prepared[task.name] = prepared
        self._voices[task.name] = Voice(prepared.renderer, prepared.prompt_format)
        if start is not None:
            try:
                adapter = task.whole.template()
                start_from(job.peft, adapter, start, self.view, base_sha256=self.base.weights_sha256)
                if adapter is not task.adapter:
                    task.whole.load(adapter.state(), {}, 0)
            except Exception:
                self.detach(task)
                raise
        return task

    def load(self, folder: str | os.PathLike[str], *, name: str = "adapter") -> Task:
        """A task without data that answers with the adapter in `folder`: a finished one, or a run's checkpoint.

        Raises AdapterError, CheckpointError, DataError (`muxtune.engine.adapters`), ConfigError for a name in use.
        """
        path = as_path(folder, "folder")
        stored = read_stored(path, name, base=self.base, view=self.backbone, preparer=self.preparer)
        task = super().attach(stored.job, Sequences(()))
        try:
            give(task.adapter, stored.values, where=str(folder))
        except Exception:
            super().detach(task)
            raise
        task.step = stored.step
        self._voices[task.name] = stored.voice
        if stored.prepared is not None:
            self._prepared[task.name] = stored.prepared
        return task

    def detach(self, task: Task | str) -> None:
        super().detach(task)
        name = task if isinstance(task, str) else task.name
        self._prepared.pop(name, None)
        self._voices.pop(name, None)

    def run(self) -> Iterator[StepResult]:
        """Train every attached task to its last step; yields each optimizer step. Nothing is written to disk.

        Raises TaskError at the end, when all others have been trained, for tasks that failed on the way.
        """
        failed: list[TaskEvent] = []
        for event in Runner(self).run():
            if isinstance(event, StepResult):
                yield event
            elif isinstance(event, TaskEvent) and event.kind == "failed":
                failed.append(event)
        if failed:
            told = "; ".join(f"{event.task} at step {event.step}: {event.message}" for event in failed)
            raise TaskError(f"failed: {told}", hint="all other tasks have been trained")

    def sample(
        self,
        prompt: Prompt,
        *,
        task: Task | str | None = None,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        on_text: Callable[[str], None] | None = None,
    ) -> str:
        """The reply to one prompt, written as the task's training data wrote prompts; `on_text` hears it piecewise."""
        request = self._request(task, prompt, max_new_tokens, temperature, top_p, seed)
        ids: list[int] = []
        told = ""

        def hear(_: int, token: int) -> None:
            nonlocal told
            ids.append(token)
            text = self._decode(ids)
            if on_text is not None and not text.endswith("\ufffd"):  # a character is still incomplete
                on_text(text[len(told) :])
                told = text

        (new_ids,) = generate(self, [request], on_token=hear)
        text = self._decode(new_ids)
        if on_text is not None and len(text) > len(told):
            on_text(text[len(told) :])
        return text

    def generate(
        self,
        requests: Sequence[tuple[Task | str | None, Prompt]],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[str]:
        """Replies to many prompts for any mix of adapters, decoded together on the one backbone."""
        drawn = [
            self._request(task, prompt, max_new_tokens, temperature, top_p, seed)
            for task, prompt in as_requests(requests)
        ]
        return [self._decode(ids) for ids in generate(self, drawn)]

    def save(
        self,
        task: Task | str,
        folder: str | os.PathLike[str],
        *,
        base_name: str | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write the task's adapter as a folder that peft loads, with tokenizer, card and manifest.

        A folder that holds anything is refused; with `overwrite` an adapter in it is replaced, and other files stay.

        Raises AdapterError where it cannot be written, StateError for a task that was loaded from such a folder.
        """
        found, dest = self.task(task), as_path(folder, "folder")
        with writing(dest):
            if not overwrite:
                require_free(dest, hint="choose a new folder, or pass overwrite=True")
            self.export(found, dest, base_name=base_name)
        return dest

    def export(self, task: Task | str, dest: Path, *, base_name: str | None = None) -> None:
        """`save` into a folder that may hold a run; errors of the disk are left as they are."""
        found = self.task(task)
        prepared = self._prepared.get(found.name)
        if prepared is None:
            raise StateError("was loaded from an adapter folder", where=found.name, hint="copy that folder")
        exported = payload(found.job.peft, found.whole.adapter(), self.view)
        manifest = TrainingManifest(
            BaseIdentity(base_name or self.base.public_name, self.base.weights_sha256, self.base.note or None),
            prepared.prompt_format,
            found.job.model_dump(mode="json"),
            prepared.datasets,
            found.job.seed,
            found.step,
        )
        own_template = prepared.renderer.template_source if found.job.chat_template is not None else None
        write_adapter(dest, exported, manifest, model_folder=self.base.path, chat_template=own_template)

    def _request(
        self,
        task: object,
        prompt: object,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Request:
        """Raises ConfigError for an argument of the wrong kind or range, and for a prompt that leaves no room."""
        max_new_tokens = as_count(max_new_tokens, "max_new_tokens")
        drawn = (
            as_number(temperature, "temperature"),
            as_number(top_p, "top_p", most=1),
            as_count(seed, "seed", least=0),
        )
        name, voice = self._voice(task)
        ids = prompt_ids(voice.renderer, voice.form, as_prompt(prompt))
        if not len(ids):
            raise ConfigError("the prompt is empty: there is no token to go on from", where="prompt")
        positions = self.backbone.max_positions
        if positions is not None:
            lead = self.task(name).job.peft.lead if name is not None else 0
            room = positions - lead - 1
            if len(ids) > room:
                beside = f" beside {lead} virtual tokens" if lead else ""
                raise ConfigError(
                    f"the prompt has {len(ids)} tokens, there is room for {room} and a reply{beside}",
                    where="prompt",
                    hint=f"shorten it: the base model takes {positions} tokens, the reply among them",
                )
            max_new_tokens = min(max_new_tokens, positions - lead - len(ids))
        return Request(name, ids.tolist(), frozenset(voice.form.stop_token_ids), max_new_tokens, *drawn)

    def _voice(self, task: object) -> tuple[str | None, Voice]:
        """How prompts are written for a task, or for the bare backbone."""
        if task is not None:
            name = self.task(task).name
            return name, self._voices[name]
        if self._bare is None:
            self._bare = base_voice(Renderer(self.preparer.tokenizer, now=datetime.now(UTC)))
        return None, self._bare

    def _decode(self, ids: Sequence[int]) -> str:
        return self.preparer.tokenizer.decode(list(ids))


def _table(backbone: Backbone, cache: Path, model: str, notice: Callable[[str], None]) -> OperatorTable:
    """The kept operator table, or a new one."""

    def measuring(backbone: Backbone, *, model: str) -> OperatorTable:
        notice(f"measuring once what operators cost here: about {BUDGET_S:.0f} s")
        try:
            return measure(backbone, model=model)
        finally:
            notice("")

    return kept_table(backbone, cache, model=model, measuring=measuring, notice=notice).table
