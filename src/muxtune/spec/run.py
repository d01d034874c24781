"""RunSpec: one backbone, the jobs that train on it, and how the machine is used. Validated, frozen, JSON round trip.

What nothing implements yet is refused, never ignored.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from muxtune.errors import ConfigError
from muxtune.spec.border import Spec
from muxtune.spec.job import JobSpec
from muxtune.spec.names import first_repeated
from muxtune.spec.policy import POLICIES, Policy
from muxtune.spec.scalars import Integer, PathText, Size, choice, clip

_DTYPE_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float64": "fp64"}
MAX_THREADS = 4096
MAX_DEVICES = 4096
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")

read_block = choice("auto", "fast", "transformers")
Block = Annotated[Literal["auto", "fast", "transformers"], BeforeValidator(read_block)]
read_dtype = choice("auto", "fp32", "bf16", "fp64", aliases=_DTYPE_ALIASES, later=("fp16", "float16"))
DType = Annotated[Literal["auto", "fp32", "bf16", "fp64"], BeforeValidator(read_dtype)]


def read_device(value: object) -> str:
    """The name of a device. Raises ConfigError for what is none."""
    if not isinstance(value, str) or not _DEVICE.fullmatch(value.lower()):
        raise ConfigError(f"should be auto, cpu, cuda or cuda:N, got {clip(value)}")
    return value.lower()


Degree = Annotated[Integer, Field(ge=1, le=MAX_DEVICES)]


class RunSpec(Spec):
    base_model: PathText  # an alias, a folder (relative to the working directory) or a hub name
    output_dir: PathText  # relative to the working directory; a job's output is output_dir/NAME
    policy: Annotated[Policy, BeforeValidator(choice(*POLICIES))] = "muxtune"
    memory_limit: Annotated[Size, Field(ge=1)] | None = None  # bytes; None: what the machine has
    threads: Annotated[Integer, Field(ge=1, le=MAX_THREADS)] | None = None  # None: as torch chooses
    device: Annotated[str, BeforeValidator(read_device)] = "auto"  # auto: cuda if there, else cpu
    dtype: DType = "auto"  # auto: bf16 on cuda, fp32 on cpu
    block: Block = "auto"  # auto: fast for the models that it knows, else transformers
    tp: Degree = 1  # ranks that hold each layer together
    pp: Degree = 1  # stages of layers, of tp ranks each
    jobs: Annotated[tuple[JobSpec, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_unique(self) -> Self:
        repeated = first_repeated(job.name for job in self.jobs)
        if repeated is not None:
            raise ConfigError(f"two jobs are named {repeated!r} (case does not count)", where="jobs")
        return self

    def job(self, name: str) -> JobSpec:
        """The job of that name; KeyError where there is none."""
        for job in self.jobs:
            if job.name == name:
                return job
        raise KeyError(name)
