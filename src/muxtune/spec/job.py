"""JobSpec: what a tenant asks for, validated and frozen; the JSON of it reads back as an equal spec.

Every key is config.md's and holds its resolved value; None means a choice that needs the data or the model, and the
key's comment says which. A key that nothing implements yet is refused, never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from muxtune.errors import ConfigError
from muxtune.spec.border import Spec
from muxtune.spec.dataset import Dataset, Validation
from muxtune.spec.names import read_name
from muxtune.spec.peft import Lora, PeftBase, PeftSpec
from muxtune.spec.scalars import Flag, Integer, Number, PathText, choice, clip, read_list

_ADAMW_ALIASES = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw"}

Method = Annotated[Literal["sft", "dpo"], BeforeValidator(choice("sft", "dpo"))]
DEFAULT_BETA = 0.1
TrainOn = Annotated[
    Literal["assistant", "last_assistant", "completion", "all"],
    BeforeValidator(choice("assistant", "last_assistant", "completion", "all")),
]
Overlong = Annotated[
    Literal["truncate", "drop", "fail", "split"], BeforeValidator(choice("truncate", "drop", "fail", "split"))
]
SchedulerType = Annotated[
    Literal["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"],
    BeforeValidator(
        choice(
            "linear",
            "cosine",
            "constant",
            "constant_with_warmup",
            "inverse_sqrt",
            later=("cosine_with_restarts", "polynomial", "cosine_with_min_lr", "warmup_stable_decay"),
        )
    ),
]
Optimizer = Annotated[Literal["adamw"], BeforeValidator(choice("adamw", aliases=_ADAMW_ALIASES))]

_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "all")
_read_tracker = choice("none", later=_TRACKERS)


def _read_report_to(value: object) -> str:
    names = value if isinstance(value, list | tuple) else (value,)
    for name in names:
        _read_tracker(name)
    return "none"


def _check_fraction_or_count(number: float) -> float:
    if isinstance(number, float) and number > 1:
        raise ConfigError(f"should be a whole number, or a fraction below 1, got {clip(number)}")
    return number


Count = Annotated[Integer, Field(ge=1)]
FractionOrCount = Annotated[Number, Field(ge=0), AfterValidator(_check_fraction_or_count)]


def _default_learning_rate(validated: dict[str, Any]) -> float:
    peft: PeftBase = validated["peft"]
    return peft.default_learning_rate


def _default_beta(validated: dict[str, Any]) -> float | None:
    return DEFAULT_BETA if validated["method"] == "dpo" else None


class JobSpec(Spec):
    name: Annotated[str, BeforeValidator(read_name)]
    method: Method = "sft"
    peft: PeftSpec = Lora()

    datasets: Annotated[tuple[Dataset, ...], BeforeValidator(read_list), Field(min_length=1)]
    validation: Validation | None = None
    val_set_size: FractionOrCount = 0  # examples, or a fraction of them, split off for validation
    train_on: TrainOn | None = None  # None: assistant turns, the completion, or all of a text
    overlong: Overlong | None = None  # None: text is split, others are truncated
    chat_template: PathText | None = None  # a file or a bundled name; None: the model's own
    ignore_tools: Flag = False
    max_length: Annotated[Integer, Field(ge=2)] | None = None  # tokens; None: the model's, at most 2048
    shuffle: Flag = True

    learning_rate: Annotated[Number, Field(gt=0)] = Field(default_factory=_default_learning_rate)
    lr_scheduler_type: SchedulerType = "linear"
    warmup_steps: FractionOrCount = 0  # optimizer steps, or a fraction of all of them
    weight_decay: Annotated[Number, Field(ge=0)] = 0
    max_grad_norm: Annotated[Number, Field(ge=0)] = 1.0  # 0: never clipped
    optimizer: Optimizer = "adamw"
    num_train_epochs: Annotated[Number, Field(gt=0)] = 3
    max_steps: Count | None = None  # None: as many as num_train_epochs needs
    per_device_train_batch_size: Count = 8
    gradient_accumulation_steps: Count = 1
    seed: Annotated[Integer, Field(ge=0, lt=2**63)] = 42
    share_prefixes: Flag = True  # whether what sequences of a batch begin with is computed once

    save_steps: Count | None = None  # None: every epoch, and at least every 10 minutes
    save_total_limit: Count = 2
    eval_steps: Count | None = None  # None: every epoch, and at the end
    logging_steps: Count = 10  # steps between lines of progress where no live table is shown
    adapter_path: PathText | None = None  # a PEFT folder to start from
    sample_prompts: Annotated[tuple[str, ...], BeforeValidator(read_list)] = ()
    beta: Annotated[Number, Field(gt=0)] | None = Field(default_factory=_default_beta)  # of dpo; None for sft
    report_to: Annotated[Literal["none"], BeforeValidator(_read_report_to)] = "none"

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        self._method_agrees()
        if self.lr_scheduler_type == "constant" and self.warmup_steps:
            raise ConfigError(
                "a constant schedule has no warmup",
                where="warmup_steps",
                hint="lr_scheduler_type: constant_with_warmup",
            )
        if self.validation is not None and self.val_set_size:
            raise ConfigError("validation and val_set_size both say what is held out", where="val_set_size")
        inner = self.validation.eval_steps if self.validation else None
        if inner is not None and self.eval_steps not in (None, inner):
            raise ConfigError(f"validation.eval_steps says {inner}, eval_steps {self.eval_steps}", where="eval_steps")
        if self.eval_steps is not None and self.validation is None and not self.val_set_size:
            raise ConfigError("nothing is held out to evaluate", where="eval_steps", hint="add validation")
        return self

    def _method_agrees(self) -> None:
        """What `method` means for other keys; what the data are is found out when they are read."""
        pairs = self.method == "dpo"
        if pairs != (self.beta is not None):
            raise ConfigError(
                "dpo needs a beta" if pairs else "belongs to method dpo",
                where="beta",
                hint=f"the default is {DEFAULT_BETA}" if pairs else "leave it out, or say method: dpo",
            )
        for data in (*self.datasets, *((self.validation,) if self.validation else ())):
            if data.type is not None and (data.type == "preference") != pairs:
                hint = "its data are of type preference" if pairs else "data of type preference need method: dpo"
                raise ConfigError(f"{data.type} data do not go with method {self.method}", where="method", hint=hint)
        if pairs and self.train_on in ("all", "last_assistant"):
            raise ConfigError("dpo trains on the two responses, nothing else", where="train_on", hint="leave it out")
        if pairs and self.overlong == "split":
            raise ConfigError("a preference pair cannot be split", where="overlong", hint="truncate, drop or fail")

    @property
    def group_size(self) -> int:
        """Sequences that stay together in a batch: the two of a pair in dpo."""
        return 2 if self.method == "dpo" else 1

    @property
    def effective_batch(self) -> int:
        """Examples (in dpo: pairs) of one optimizer step. Their split into micro-batches is the planner's affair."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def eval_every(self) -> int | None:
        """Optimizer steps between evaluations; None: at the end of every epoch, and of the training."""
        return (self.validation.eval_steps if self.validation else None) or self.eval_steps
