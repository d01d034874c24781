"""Keys as other tools write them, and the one key of ours that each means.

The tables below are the documentation: (key, ours, whose word). An alias is renamed, some with their value turned
(`train_on_inputs: true` is `train_on: all`), and its origin says so. An alias with a dot is a key inside a mapping that
means nothing else here (`tokenizer: {max_seq_len: 512}`). One key given under two names is an error, even with equal
values: which one was meant can't be known.

Known keys that cannot mean anything here are in REFUSED with the reason; every other unknown key is refused, naming
the nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from muxtune.errors import ConfigError
from muxtune.spec.border import unknown_key
from muxtune.spec.job import JobSpec
from muxtune.spec.merge import merge
from muxtune.spec.scalars import clip, read_flag, read_number
from muxtune.spec.tree import Leaf, Node, Path, Table, is_null, nested, noted, values


@dataclass(frozen=True, slots=True)
class Alias:
    name: str  # dotted where it lies in a mapping
    ours: str  # dotted
    tools: str
    turn: Callable[[Leaf], str | None] | None = None  # the value's text under our key; None: our default


def _by_flag(yes: str | None, no: str | None) -> Callable[[Leaf], str | None]:
    return lambda leaf: yes if read_flag(leaf.text) else no


def _fraction(leaf: Leaf) -> str | None:
    if not 0 <= read_number(leaf.text) < 1:
        raise ConfigError(f"should be a fraction below 1, got {clip(leaf.text)}", hint="warmup_steps counts steps")
    return leaf.text


def _method(leaf: Leaf) -> str | None:
    return "sft" if leaf.text == "supervised" else leaf.text


RUN_ALIASES = (
    Alias("model_name_or_path", "base_model", "HF, LLaMA-Factory"),
    Alias("model", "base_model", "ms-swift, Unsloth, OpenAI"),
    Alias("checkpointer.checkpoint_dir", "base_model", "torchtune"),
)

JOB_ALIASES = (
    Alias("method.type", "method", "OpenAI", _method),
    Alias("adapter", "peft.type", "Axolotl"),
    Alias("finetuning_type", "peft.type", "LLaMA-Factory"),
    Alias("tuner_type", "peft.type", "ms-swift"),
    Alias("train_type", "peft.type", "ms-swift"),
    Alias("training_type", "peft.type", "Unsloth"),
    Alias("peft_type", "peft.type", "PEFT"),
    Alias("r", "peft.r", "PEFT, mLoRA"),
    Alias("lora_r", "peft.r", "Axolotl, Unsloth"),
    Alias("lora_rank", "peft.r", "LLaMA-Factory, ms-swift, torchtune"),
    Alias("alpha", "peft.lora_alpha", "mLoRA"),
    Alias("lora_alpha", "peft.lora_alpha", "all"),
    Alias("dropout", "peft.lora_dropout", "mLoRA"),
    Alias("lora_dropout", "peft.lora_dropout", "all"),
    Alias("target_modules", "peft.target_modules", "PEFT, ms-swift, Unsloth"),
    Alias("lora_target", "peft.target_modules", "LLaMA-Factory"),
    Alias("lora_target_modules", "peft.target_modules", "Axolotl"),
    Alias("lora_target_linear", "peft.target_modules", "Axolotl", _by_flag("all-linear", None)),
    Alias("use_dora", "peft.use_dora", "PEFT, LLaMA-Factory, ms-swift"),
    Alias("peft_use_dora", "peft.use_dora", "Axolotl"),
    Alias("use_rslora", "peft.use_rslora", "PEFT, LLaMA-Factory, ms-swift"),
    Alias("peft_use_rslora", "peft.use_rslora", "Axolotl"),
    Alias("init_lora_weights", "peft.init_lora_weights", "PEFT"),
    Alias("peft_init_lora_weights", "peft.init_lora_weights", "Axolotl"),
    Alias("pissa_init", "peft.init_lora_weights", "LLaMA-Factory", _by_flag("pissa", None)),
    Alias("feedforward_modules", "peft.feedforward_modules", "PEFT"),
    Alias("num_virtual_tokens", "peft.num_virtual_tokens", "PEFT"),
    Alias("prefix_length", "peft.num_virtual_tokens", "adapters"),
    Alias("prompt_length", "peft.num_virtual_tokens", "adapters"),
    Alias("reduction_factor", "peft.reduction_factor", "adapters"),
    Alias("bottleneck_size", "peft.bottleneck_size", "LLM-Adapters"),
    Alias("non_linearity", "peft.non_linearity", "adapters, LLM-Adapters"),
    Alias("training_file", "datasets", "OpenAI"),
    Alias("validation_file", "validation.path", "OpenAI"),
    Alias("val_size", "val_set_size", "LLaMA-Factory"),
    Alias("split_dataset_ratio", "val_set_size", "ms-swift"),
    Alias("train_on_inputs", "train_on", "Axolotl", _by_flag("all", None)),
    Alias("train_on_input", "train_on", "torchtune", _by_flag("all", None)),
    Alias("train_on_prompt", "train_on", "LLaMA-Factory", _by_flag("all", None)),
    Alias("mask_history", "train_on", "LLaMA-Factory", _by_flag("last_assistant", None)),
    Alias("train_on_completions", "train_on", "Unsloth", _by_flag(None, "all")),
    Alias("completion_only_loss", "train_on", "TRL", _by_flag("completion", "all")),
    Alias("assistant_only_loss", "train_on", "TRL", _by_flag("assistant", None)),
    Alias("sequence_len", "max_length", "Axolotl"),
    Alias("cutoff_len", "max_length", "LLaMA-Factory, mLoRA"),
    Alias("max_seq_length", "max_length", "Unsloth"),
    Alias("max_seq_len", "max_length", "torchtune"),
    Alias("tokenizer.max_seq_len", "max_length", "torchtune"),
    Alias("lr", "learning_rate", "mLoRA"),
    Alias("optimizer.lr", "learning_rate", "torchtune"),
    Alias("lr_scheduler", "lr_scheduler_type", "Axolotl, torchtune"),
    Alias("warmup_ratio", "warmup_steps", "HF, LLaMA-Factory, ms-swift", _fraction),
    Alias("optim", "optimizer", "HF"),
    Alias("num_epochs", "num_train_epochs", "Axolotl, Unsloth, mLoRA"),
    Alias("n_epochs", "num_train_epochs", "OpenAI"),
    Alias("epochs", "num_train_epochs", "torchtune"),
    Alias("micro_batch_size", "per_device_train_batch_size", "Axolotl"),
    Alias("mini_batch_size", "per_device_train_batch_size", "mLoRA"),
    Alias("batch_size", "per_device_train_batch_size", "Unsloth, torchtune, OpenAI"),
    Alias("random_seed", "seed", "Unsloth"),
    Alias("save_step", "save_steps", "mLoRA"),
)

PEFT_ALIASES = (
    Alias("peft_type", "type", "PEFT"),
    Alias("rank", "r", "common"),
    Alias("lora_r", "r", "Axolotl, Unsloth"),
    Alias("lora_rank", "r", "LLaMA-Factory, ms-swift, torchtune"),
    Alias("alpha", "lora_alpha", "mLoRA"),
    Alias("dropout", "lora_dropout", "mLoRA"),
    Alias("lora_target", "target_modules", "LLaMA-Factory"),
    Alias("lora_target_modules", "target_modules", "Axolotl"),
    Alias("lora_target_linear", "target_modules", "Axolotl", _by_flag("all-linear", None)),
    Alias("prefix_length", "num_virtual_tokens", "adapters"),
    Alias("prompt_length", "num_virtual_tokens", "adapters"),
)

# Rows are always packed and packing changes no result, so `true` is how things are and `false` cannot be had.
PACKING = ("sample_packing", "packing", "neat_packing", "packed", "padding_free")

REFUSED: Mapping[str, tuple[str, str]] = {
    "base_model": ("one backbone a run: all jobs share the frozen model", "base_model belongs to the top of the file"),
    "output_dir": ("a job's output is always the run's output_dir/NAME", "output_dir belongs to the top of the file"),
    "learning_rate_multiplier": ("a rate is given as it is", "learning_rate; left out, it is the PEFT type's own"),
    "lora_attn_modules": ("modules are named as the base model names them", "target_modules: [q_proj, v_proj]"),
    "apply_lora_to_mlp": ("modules are named as the base model names them", "target_modules: [up_proj, down_proj]"),
    "resume_from_checkpoint": ("resuming is not a matter of the config", "muxtune train CONFIG --resume"),
    "saves_per_epoch": ("saving is counted in steps, or left to every epoch", "save_steps"),
    "eval_split": ("a split has no name in a local file", "validation: a file, or val_set_size: a fraction"),
    "loss_scale": ("weights of tokens are not supported yet", "train_on"),
    "roles_to_train": ("roles are not chosen one by one", "train_on: assistant | last_assistant | all"),
    "train_on_eos": ("each trained turn is trained with its end-of-turn token", "leave it out"),
    "load_in_4bit": ("the backbone is not quantised", "leave it out"),
    "load_in_8bit": ("the backbone is not quantised", "leave it out"),
}


_SHORTHAND = {"peft": "type", "validation": "path"}
_JOB_KEYS = (*JobSpec.model_fields, "matrix")
_JOB_ALIAS_NAMES = tuple(alias.name for alias in JOB_ALIASES)
_JOB_ALIAS_HEADS = frozenset(name.split(".")[0] for name in _JOB_ALIAS_NAMES)
_RUN_ALIAS_HEADS = frozenset(alias.name.split(".")[0] for alias in RUN_ALIASES)


def canonical_run(table: Table) -> Table:
    return _renamed(_lifted(table, RUN_ALIASES), RUN_ALIASES, "")


def canonical_job(table: Table, at: str) -> Table:
    """A job's keys, or some of them, under our names; `at` says in errors whose they are (`jobs.sql`)."""
    table = _lifted(table, JOB_ALIASES)
    for key, node in table.entries.items():
        _check_key(key, node, at)
    table = _spelled_out(_without_packing(table, at))
    peft = table.get("peft")
    if isinstance(peft, Table):
        renamed = _renamed(peft, PEFT_ALIASES, f"{at}.peft".lstrip("."))
        table = replace(table, entries={**table.entries, "peft": renamed})
    return _renamed(table, JOB_ALIASES, at)


def job_key_names() -> tuple[str, ...]:
    """Every key a job may be written with, aliases too: what a misspelt key may have meant."""
    return (*_JOB_KEYS, *_JOB_ALIAS_NAMES)


def is_run_alias(key: str) -> bool:
    """Whether a top-level key is an alias of a run's key, or the mapping that holds one."""
    return key in _RUN_ALIAS_HEADS


def is_job_key(key: str) -> bool:
    """Whether canonical_job knows the key; of a mapping that may hold an alias, it judges what is inside."""
    return key in _JOB_KEYS or key in _JOB_ALIAS_HEADS or key in PACKING


def is_refused_key(key: str) -> bool:
    """Whether canonical_job knows the key and says why it means nothing here."""
    return key in REFUSED


def _check_key(key: str, node: Node, at: str) -> None:
    ours = next((alias.ours for alias in RUN_ALIASES if alias.name == key), key)
    if ours in REFUSED:
        reason, hint = REFUSED[ours]
        raise ConfigError(reason, where=node.origin.at(at, key), hint=hint)
    if key not in _JOB_KEYS and key not in _JOB_ALIAS_NAMES and key not in PACKING:
        raise unknown_key(key, _JOB_KEYS, also=_JOB_ALIAS_NAMES, where=node.origin.at(at))


def _lifted(table: Table, aliases: Sequence[Alias]) -> Table:
    """With every alias that lies in a mapping taken out of it, under its dotted name."""
    entries = dict(table.entries)
    for alias in aliases:
        head, _, tail = alias.name.partition(".")
        holder = entries.get(head)
        if tail and isinstance(holder, Table) and tail in holder.entries:
            entries[alias.name] = holder.entries[tail]
            entries[head] = holder.without(tail)
            if len(holder.entries) == 1:
                del entries[head]
    return replace(table, entries=entries)


def _spelled_out(table: Table) -> Table:
    """A mapping written as one value (`peft: lora`) as the mapping it is, so that it merges like one."""
    entries = dict(table.entries)
    for key, inner in _SHORTHAND.items():
        node = entries.get(key)
        if isinstance(node, Leaf) and node.text is not None:
            entries[key] = nested((inner,), node)
    return replace(table, entries=entries)


def _without_packing(table: Table, at: str) -> Table:
    for key in PACKING:
        node = table.get(key)
        if isinstance(node, Leaf) and not _turned(node, lambda leaf: str(read_flag(leaf.text) or ""), at, key):
            raise ConfigError(
                "rows are always packed", where=node.origin.at(at, key), hint="it changes no result; leave it out"
            )
    return table.without(*PACKING)


def _renamed(table: Table, aliases: Sequence[Alias], at: str) -> Table:
    by_name = {alias.name: alias for alias in aliases}
    result = table.without(*by_name)
    given = {path: ".".join(path) for path, _ in values(result)}
    for key, node in table.entries.items():
        if key not in by_name:
            continue
        alias = by_name[key]
        path = tuple(alias.ours.split("."))
        other = next((name for known, name in given.items() if _overlap(known, path)), None)
        if other is not None:
            message = f"{key} and {other} both set {alias.ours}"
            raise ConfigError(message, where=node.origin.at(at, key), hint=f"keep {alias.ours} alone")
        given[path] = key
        result = merge(result, nested(path, noted(_value(alias, node, at), f"alias {key}")))
    return replace(result, origin=table.origin)


def _overlap(one: Path, other: Path) -> bool:
    shared = min(len(one), len(other))
    return one[:shared] == other[:shared]


def _value(alias: Alias, node: Node, at: str) -> Node:
    if alias.turn is None or is_null(node):
        return node
    if not isinstance(node, Leaf):
        raise ConfigError("should be one value", where=node.origin.at(at, alias.name))
    return Leaf(_turned(node, alias.turn, at, alias.name), node.origin)


def _turned(leaf: Leaf, turn: Callable[[Leaf], str | None], at: str, key: str) -> str | None:
    try:
        return turn(leaf)
    except ConfigError as error:
        raise ConfigError(error.message, where=leaf.origin.at(at, key), hint=error.hint) from None
