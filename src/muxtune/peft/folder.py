"""Adapter folders: what a training leaves, and what `adapter_path`, `sample` and `export` read.

    adapter_config.json, adapter_model.safetensors    what peft (and vLLM) load
    training_manifest.json                            where it came from, and how its prompts look
    README.md                                         the card
    tokenizer files, chat template, generation_config.json

Written so that the adapter is whole or absent (`durable.py`); the same training writes the same bytes. Read as
untrusted input: `untrusted.py` guards the containers, the types and `convert.py` the content, and a pickle is refused,
never opened. A folder is read in time and memory proportional to what its config may hold on this model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from muxtune.data.manifest import FORMAT, JsonValue, TrainingManifest
from muxtune.durable import staged_folder, write_text
from muxtune.errors import AdapterError
from muxtune.peft.card import card
from muxtune.peft.convert import PeftPayload, Shape, check_layout
from muxtune.peft.untrusted import SafetensorsFile, read_json

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MANIFEST_FILE = "training_manifest.json"
CARD_FILE = "README.md"
GENERATION_FILE = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    TEMPLATE_FILE,
)
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE, CARD_FILE, GENERATION_FILE, *TOKENIZER_FILES)  # all we write
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The tensors of a folder, fp32, that have been judged sound. `manifest` is None where another tool wrote it."""

    tensors: Mapping[str, Tensor]
    base_name: str | None
    manifest: TrainingManifest | None


def write_adapter(
    dest: Path,
    payload: PeftPayload,
    manifest: TrainingManifest,
    *,
    model_folder: Path | None = None,
    chat_template: str | None = None,
) -> None:
    """Write an adapter folder at `dest`, or into it where it holds a run.

    Args:
        payload: the adapter in peft's format, such as `export_lora` makes.
        model_folder: the base model's folder; its tokenizer and generation config are copied.
        chat_template: the template of the job, where it is not the model's own.

    Raises:
        AdapterError: the base model's name is a path of this machine.
    """
    base = manifest.base.name
    check_public_name(base)
    config = {**payload.config, "base_model_name_or_path": base}
    with staged_folder(dest, key_file=CONFIG_FILE) as staging:
        save_file(dict(payload.tensors), staging / WEIGHTS_FILE, metadata={"format": "pt"})
        write_text(staging / CONFIG_FILE, _json(config))
        write_text(staging / MANIFEST_FILE, _json(manifest.to_json()))
        write_text(staging / CARD_FILE, card(config, manifest))
        if model_folder is not None:
            _copy_tokenizer(model_folder, staging)
            generation = generation_config(model_folder, manifest.prompt.stop_token_ids)
            write_text(staging / GENERATION_FILE, _json(generation))
        if chat_template is not None:
            write_text(staging / TEMPLATE_FILE, chat_template)


def require_free(dest: Path, *, hint: str = "choose a new folder") -> None:
    """Raises AdapterError where there is something at `dest` already."""
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise AdapterError("there is something already", where=str(dest), hint=hint)


@contextmanager
def writing(dest: Path) -> Iterator[None]:
    """What the disk refuses while the block writes `dest`, as an AdapterError that names the folder asked for."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if isinstance(error, FileExistsError):  # where a folder should be
            reason = f"{error.filename} is a file"
        raise AdapterError(
            f"cannot be written: {reason}",
            where=str(dest),
            hint="choose a folder in a place that may be written and has room",
        ) from error


def check_public_name(base: str) -> None:
    """Raises AdapterError where a base model's name is a path, which means nothing on another machine."""
    if not base or Path(base).is_absolute() or base.startswith(("~", "./", "../")):
        raise AdapterError(
            f"the base model's public name cannot be the path {base!r}",
            hint="other machines do not have it; give a name with --base-name",
        )


def read_tensors(
    folder: Path,
    config: Mapping[str, JsonValue],
    layout: Mapping[str, Shape],
    *,
    why_extra: Callable[[str], str],
    base_sha256: str | None = None,
    integers: Collection[str] = (),
    optional: Mapping[str, Shape] | None = None,
) -> StoredTensors:
    """The tensors of an adapter folder that anyone may have written, which must be exactly those of `layout`, and
    perhaps some of `optional`: fp32, and int64 those of `integers`.

    Args:
        config: of the folder, which the type has judged.
        layout: name and shape of each, as the type derives them from the config and the model.
        why_extra: says in words why a tensor of that name is none of them.
        base_sha256: the hash of the loaded base weights; an adapter whose manifest names another is refused.
        optional: tensors that may be there as well; they come in the dtype of the file.

    Raises:
        AdapterError: whatever is wrong, before any memory is spent on the tensors.
    """
    manifest = read_manifest(folder)
    _check_base(manifest, base_sha256, folder)
    weights = folder / WEIGHTS_FILE
    with SafetensorsFile(weights) as file:
        check_layout(
            file.tensors, layout, why_extra=why_extra, where=str(weights), integers=integers, optional=optional
        )
        tensors = {
            name: tensor.to(torch.int64 if name in integers else torch.float32).contiguous()
            if name in layout
            else tensor
            for name, tensor in file.load().items()
        }
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"{name!r} holds NaN or infinity", where=str(weights), hint="use an earlier checkpoint")
    base_name = config.get("base_model_name_or_path")
    return StoredTensors(tensors, base_name if isinstance(base_name, str) else None, manifest)


def read_config(folder: Path) -> Mapping[str, JsonValue]:
    """`adapter_config.json` of a folder that has its weights as safetensors.

    Raises:
        AdapterError: no adapter there, or its weights are a pickle.
    """
    if not os.path.isdir(folder):  # false of what is too long for a path, where `Path` raises
        raise AdapterError("no such folder", where=str(folder), hint="give the folder that holds adapter_config.json")
    for suffix in _PICKLE_SUFFIXES:
        pickled = folder / f"adapter_model{suffix}"
        if pickled.exists() or pickled.is_symlink():
            raise AdapterError(
                "a pickle, which can run any code when it is read, so it is never opened",
                where=str(pickled),
                hint="have its author save it as safetensors, and remove this file",
            )
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).exists():
            raise AdapterError(f"{name} is missing", where=str(folder), hint="this is not a complete adapter folder")
    return read_json(folder / CONFIG_FILE)


def read_manifest(folder: Path) -> TrainingManifest | None:
    """Our manifest, or None where the folder has none (or one of another tool)."""
    path = folder / MANIFEST_FILE
    if not path.exists() and not path.is_symlink():
        return None
    value = read_json(path)
    return TrainingManifest.from_json(value, where=str(path)) if value.get("format") == FORMAT else None


def carried_files(folder: Path) -> list[Path]:
    """The files of an adapter folder that a merged model needs too: tokenizer, template, generation config.

    Raises:
        AdapterError: one of them is a link, which could lead anywhere on this machine.
    """
    found = [folder / name for name in (*TOKENIZER_FILES, GENERATION_FILE)]
    for file in found:
        if file.is_symlink():
            raise AdapterError("a symbolic link", where=str(file), hint="copy the file itself into the folder")
    return [file for file in found if file.is_file()]


def generation_config(model_folder: Path, stop_token_ids: Sequence[int]) -> dict[str, JsonValue]:
    """The model's generation config with every stop token among its eos ids, so that replies end where they should."""
    config = _json_file(model_folder / GENERATION_FILE)
    if not config:
        model = _json_file(model_folder / "config.json")
        config = {key: model[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in model}
    own = config.get("eos_token_id")
    own_ids = own if isinstance(own, list) else [] if own is None else [own]
    return {**config, "eos_token_id": list(dict.fromkeys([*stop_token_ids, *own_ids]))}


def _check_base(manifest: TrainingManifest | None, base_sha256: str | None, folder: Path) -> None:
    theirs = manifest.base.weights_sha256 if manifest else None
    if manifest and theirs and base_sha256 and theirs != base_sha256:
        note = f", {manifest.base.note}" if manifest.base.note else ""
        raise AdapterError(
            f"trained on other base weights: {manifest.base.name}{note}, sha256 {theirs[:12]}..., "
            f"the loaded model has {base_sha256[:12]}...",
            where=str(folder / MANIFEST_FILE),
            hint="load the base model that it was trained on",
        )


def _copy_tokenizer(model_folder: Path, staging: Path) -> None:
    for name in TOKENIZER_FILES:
        if (model_folder / name).is_file():
            (staging / name).write_bytes((model_folder / name).read_bytes())


def _json_file(path: Path) -> dict[str, JsonValue]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _json(value: Mapping[str, JsonValue]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
