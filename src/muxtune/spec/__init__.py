"""What is asked for: specs of jobs, runs and PEFT types, read from YAML or built in Python. Imports no torch.

The values flow one way: a config file (load.py) or Python builds frozen specs; everything below reads them. What a
run tells back is in event.py.
"""

from muxtune.spec.cluster import ClusterSpec, Link, load_cluster
from muxtune.spec.dataset import Dataset, Validation
from muxtune.spec.event import EvalResult, EventKind, RunEvent, StepResult, TaskEvent
from muxtune.spec.job import JobSpec
from muxtune.spec.load import ResolvedRun, load_run
from muxtune.spec.peft import (
    IA3,
    BitFit,
    Bottleneck,
    LnTuning,
    Lora,
    PeftSpec,
    Place,
    PrefixTuning,
    PromptTuning,
    Shira,
)
from muxtune.spec.render import render_json, render_yaml
from muxtune.spec.resume import changed_keys, check_resume, resume_allowed
from muxtune.spec.run import RunSpec
from muxtune.spec.schedule import lr_at, steps_per_epoch, total_steps, warmup_steps
from muxtune.spec.status import JobStatus

Job = JobSpec

__all__ = [
    "IA3",
    "BitFit",
    "Bottleneck",
    "ClusterSpec",
    "Dataset",
    "EvalResult",
    "EventKind",
    "Job",
    "JobSpec",
    "JobStatus",
    "Link",
    "LnTuning",
    "Lora",
    "PeftSpec",
    "Place",
    "PrefixTuning",
    "PromptTuning",
    "ResolvedRun",
    "RunEvent",
    "RunSpec",
    "Shira",
    "StepResult",
    "TaskEvent",
    "Validation",
    "changed_keys",
    "check_resume",
    "load_cluster",
    "load_run",
    "lr_at",
    "render_json",
    "render_yaml",
    "resume_allowed",
    "steps_per_epoch",
    "total_steps",
    "warmup_steps",
]
