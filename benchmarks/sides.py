"""Our sides of the benchmark: the engine itself, driven as its round loop drives it.

*Fused* runs the tasks of a step as one round under `fuse-all`: as many tasks a pass as the engine's own limits allow.
*Task by task* is the same engine on the same backbone under `sequential`, each task in passes of its own. What lies
between the two is fusing; what lies between the second and transformers + peft is work not done (padding, head, the
lowest layers' input gradients) and cheaper work (one flat optimizer). Everything else - sequences, start matrices,
AdamW, clipping, schedule - is what `baselines` gives the other side.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.baselines import Matrices, Recipe
from benchmarks.loads import Load, light
from muxtune.engine.engine import DEFAULT_FUSE_TOKENS, Engine
from muxtune.engine.load import load_backbone
from muxtune.engine.planning import Planning
from muxtune.engine.task import Sequences, Task
from muxtune.models.backbone import Backbone
from muxtune.models.sources import resolve
from muxtune.spec.job import JobSpec
from muxtune.spec.peft import Lora
from muxtune.spec.policy import Policy


@dataclass(slots=True)
class EngineSide:
    """The engine on a load; `losses` as in `baselines.Side`, one list a task."""

    engine: Engine
    tasks: tuple[Task, ...]
    losses: list[list[float]]

    def step(self, index: int) -> None:
        """Train step `index` of every task: one round."""
        assert all(task.step == index for task in self.tasks), "steps run in order, each once"
        schedule = self.engine.schedule([task.participant() for task in self.tasks])
        record = self.engine.execute(schedule)
        steps = {action.step.task: action.step for action in record.actions if action.step is not None}
        for task, losses in zip(self.tasks, self.losses, strict=True):
            assert steps[task.name].error is None, steps[task.name].error
            losses.append(steps[task.name].loss)


def engine_side(
    backbone: Backbone,
    load: Load,
    recipe: Recipe,
    init: Matrices | None = None,
    *,
    policy: Policy = "fuse-all",
    planning: Planning | None = None,
    fuse_tokens: int = DEFAULT_FUSE_TOKENS,
    plain: bool = False,
    dropout: float = 0.0,
    together: int = 1,
    overlap: bool = True,
) -> EngineSide:
    """Attach every task of the load to an engine of its own on `backbone`.

    Each starts from `init`, or from the engine's own draw.
    """
    engine = Engine(
        backbone,
        policy=policy,
        planning=planning,
        fuse_tokens=fuse_tokens,
        plain=plain,
        together=together,
        overlap=overlap,
    )
    tasks = []
    for number, batches in enumerate(load.tasks):
        sequences = tuple(sequence for batch in batches for sequence in batch)
        task = engine.attach(job_of(f"task{number}", recipe, len(batches[0]), dropout), Sequences(sequences))
        if init is not None:
            task.adapter.load_pairs(init)
        tasks.append(task)
    return EngineSide(engine, tuple(tasks), [[] for _ in tasks])


def muxtune_tasks(folder: Path, tasks: int) -> EngineSide:
    """The contender of the memory measurement: one process, all tasks attached and stepped in one micro-batch."""
    backbone = load_backbone(resolve(str(folder)), device="cpu", dtype="fp32")
    side = engine_side(backbone, light(1, vocab=backbone.vocabulary, tasks=tasks), Recipe())
    side.step(0)
    return side


def job_of(name: str, recipe: Recipe, micro_batch: int = 1, dropout: float = 0.0) -> JobSpec:
    """The recipe as a job. Sequences come ready-made, so the data set it names is never read."""
    return JobSpec(
        name=name,
        datasets=("sequences.jsonl",),
        peft=Lora(r=recipe.r, lora_alpha=recipe.lora_alpha, lora_dropout=dropout),
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="linear",
        max_grad_norm=recipe.max_grad_norm,
        max_steps=recipe.schedule_steps,
        per_device_train_batch_size=micro_batch,
        shuffle=False,
    )
