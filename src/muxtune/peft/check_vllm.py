"""Would vLLM serve this adapter folder, and serve the adapter rather than the bare base model?

vLLM refuses some folders when they are loaded; worse, it drops tensors whose names match no module and then answers
as the base model. Both kinds are found here without vLLM, from the config and the header alone. Sources: vLLM's
`lora/peft_helper.py` (features), `config/lora.py` (ranks), `lora/utils.py` (tensor names), and its issues 9280, 32599
and 7441. Whether vLLM has LoRA for the base model's architecture at all is not checked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from muxtune.data.manifest import JsonValue
from muxtune.peft.adapter_config import clip
from muxtune.peft.convert import PREFIX
from muxtune.peft.folder import WEIGHTS_FILE, read_config
from muxtune.peft.registry import is_mergeable
from muxtune.peft.untrusted import SafetensorsFile

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank may be; an adapter may have any rank up to it
_DEFAULT_MAX_RANK = 16
_SHOWN = 5
_NAME = re.compile(re.escape(PREFIX) + r"(?P<module>.+)\.lora_(?P<kind>[AB])\.weight")
_EMBEDDING = (".lora_embedding_A", ".lora_embedding_B")
# Modules that no LoRA of vLLM's current releases can be put on.
_OUTSIDE = re.compile(r"(^|\.)(lm_head|embed_out|embed_tokens|wte|score)(\.|$)")


@dataclass(frozen=True, slots=True)
class VllmReport:
    """`problems` say why vLLM would refuse the folder or serve it wrong, without its name; `flags` are what it must be
    started with."""

    problems: tuple[str, ...]
    flags: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


def check_vllm(folder: Path, attach_points: Collection[str]) -> VllmReport:
    """Check the adapter in `folder` against vLLM's rules and the module paths of its base model.

    Raises:
        AdapterError: the folder is no adapter, or its files are damaged or unsafe to read.
    """
    config = read_config(folder)
    with SafetensorsFile(folder / WEIGHTS_FILE) as file:
        tensors = file.tensors
    other = _other_type(config)
    if other is not None:
        return VllmReport((other,), ())  # all else that would be wrong comes of that
    names = {key: match for key, info in tensors.items() if len(info.shape) == 2 and (match := _NAME.fullmatch(key))}
    ranks = {tensors[key].shape[0] if m["kind"] == "A" else tensors[key].shape[-1] for key, m in names.items()}
    problems = [
        *_config_problems(config),
        *_name_problems(tensors, names, attach_points),
        *_rank_problems(config.get("r"), ranks),
    ]
    return VllmReport(tuple(problems), _flags(max(ranks, default=1)))


def _other_type(config: Mapping[str, JsonValue]) -> str | None:
    """Why vLLM has nothing that could serve an adapter of this kind; None for a plain LoRA."""
    named = config.get("peft_type")
    if named != "LORA":
        advice = "; export it merged, if the base model has the weights that it changes"
        return f"peft_type {clip(named)}: LoRA only is served{advice if is_mergeable(named) else ''}"
    return "DoRA is not supported; export it merged" if config.get("use_dora") else None


def _config_problems(config: Mapping[str, JsonValue]) -> list[str]:
    problems = [
        f"adapter_config.json has no {key!r}"
        for key in ("r", "lora_alpha", "target_modules")
        if config.get(key) is None
    ]
    if config.get("modules_to_save"):
        problems.append("modules_to_save are refused")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        problems.append("a trained bias (bias, lora_bias) is refused")
    problems += [
        f"{key} is ignored: the modules that it names would be scaled wrongly"
        for key in ("rank_pattern", "alpha_pattern")
        if config.get(key)
    ]
    return problems


def _name_problems(
    tensors: Collection[str], names: Mapping[str, re.Match[str]], attach_points: Collection[str]
) -> list[str]:
    modules = {match["module"] for match in names.values()}
    ends = {module for module in modules if _OUTSIDE.search(module)}
    outside = {key for key in tensors if key.endswith(_EMBEDDING)}
    outside |= {key for key, match in names.items() if match["module"] in ends}
    odd = sorted(set(tensors) - set(names) - outside)
    unknown = sorted(modules - set(attach_points) - ends)
    halves = sorted(
        m for m in modules if not {f"{PREFIX}{m}.lora_A.weight", f"{PREFIX}{m}.lora_B.weight"} <= set(names)
    )
    problems = []
    if not modules and not outside:
        problems.append("there is no LoRA tensor: the bare base model would be served")
    if odd:
        problems.append(f"tensors that are not lora_A or lora_B weights are refused: {_some(odd)}")
    if outside:
        shown = _some(sorted(key.removeprefix(PREFIX) for key in outside))
        problems.append(f"tensors on the embedding or the head are not loaded: {shown}; export it merged")
    if unknown:
        problems.append(f"no such module in the base model, these would be dropped silently: {_some(unknown)}")
    if halves:
        problems.append(f"lora_A or lora_B is missing: {_some(halves)}")
    return problems


def _rank_problems(r: JsonValue, ranks: Collection[int]) -> list[str]:
    problems = []
    if any(rank != r for rank in ranks):
        problems.append(
            f"r is {clip(r)} but the tensors have rank {', '.join(map(str, sorted(ranks)))}: they are scaled by r"
        )
    if any(rank > RANKS[-1] for rank in ranks):
        problems.append(f"rank {max(ranks)} is above {RANKS[-1]}, the largest that can be loaded")
    return problems


def _flags(rank: int) -> tuple[str, ...]:
    wanted = next((allowed for allowed in RANKS if allowed >= rank), RANKS[-1])
    return ("--enable-lora",) if wanted <= _DEFAULT_MAX_RANK else ("--enable-lora", "--max-lora-rank", str(wanted))


def _some(names: list[str]) -> str:
    shown = ", ".join(name if len(name) <= 100 else f"{name[:97]}..." for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
