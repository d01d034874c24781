"""Is this folder a model that may be loaded? Checked before any library opens it.

The boundary: files and JSON, no torch. A folder is untrusted input: weights are safetensors only (a pickle can run code
when it is read), a config that brings code of its own (`auto_map`) is refused, shards are plain names inside the
folder, links do not lead out of it (out of the repository's folder in a Hugging Face cache, whose snapshots are links),
and each file has the size its header says. Costs a read of the JSON files and the headers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muxtune.errors import ModelError
from muxtune.models.safetensors_file import TensorEntry, read_entries

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_MAX_JSON_BYTES = 32 << 20
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}\.safetensors")


@dataclass(frozen=True, slots=True)
class Layout:
    """A checked folder: what `config.json` calls the architecture, the weight files and every tensor in them."""

    path: Path
    model_type: str
    weight_files: tuple[Path, ...]
    tensors: tuple[TensorEntry, ...]


def check_folder(folder: Path) -> Layout:
    """The layout of a model folder. Raises ModelError, saying what makes it unusable and what to do."""
    if (folder / "adapter_config.json").exists():
        hint = "give its base model as base_model, and the adapter as a job's adapter_path"
        raise ModelError("this folder holds an adapter, not a model", where=str(folder), hint=hint)
    config = _check_config(folder)
    weight_files = _weight_files(folder)
    tensors = tuple(entry for file in weight_files for entry in read_entries(file))
    if weight_files[0].name != WEIGHTS:
        _check_placed(folder, tensors)
    names = {entry.name for entry in tensors}
    if len(names) != len(tensors):
        raise ModelError("a tensor occurs in two weight files", where=str(folder))
    if not names:
        raise ModelError("the weight files hold no tensor", where=str(folder))
    return Layout(folder, str(config["model_type"]), weight_files, tensors)


def read_json(path: Path) -> dict[str, object]:
    """A JSON object of a model folder."""
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise ModelError(f"larger than {_MAX_JSON_BYTES} bytes", where=str(path))
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"not valid JSON: {error}", where=str(path)) from None
    if not isinstance(value, dict):
        raise ModelError("not a JSON object", where=str(path))
    return value


def _check_config(folder: Path) -> Mapping[str, object]:
    path = folder / "config.json"
    if not path.is_file():
        hint = "a model folder has config.json, model.safetensors (or shards with an index) and tokenizer files"
        raise ModelError("there is no config.json", where=str(folder), hint=hint)
    config = read_json(path)
    _refuse_code(config, path)
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.is_file():
        _refuse_code(read_json(tokenizer), tokenizer)
    if not isinstance(config.get("model_type"), str):
        raise ModelError("config.json names no model_type", where=str(path))
    if config.get("quantization_config") is not None:
        hint = "use the unquantised model, or a .gguf file, which is dequantised"
        raise ModelError("the weights are quantised in a format that is not read", where=str(path), hint=hint)
    return config


def _refuse_code(config: Mapping[str, object], path: Path) -> None:
    if config.get("auto_map"):
        hint = "use a model whose architecture transformers has built in"
        raise ModelError(
            "it wants to run Python code of its own (auto_map), which is never done", where=str(path), hint=hint
        )


def _weight_files(folder: Path) -> tuple[Path, ...]:
    if (folder / WEIGHTS).is_file():
        return (_inside(folder, WEIGHTS),)
    if (folder / INDEX).is_file():
        return _shards(folder)
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise ModelError(
            f"its weights are a pickle ({pickles[0]}), which can run code when it is read",
            where=str(folder),
            hint="get the safetensors version, or convert it on a machine where you trust the file",
        )
    raise ModelError(f"there are no weights: neither {WEIGHTS} nor {INDEX}", where=str(folder))


def _shards(folder: Path) -> tuple[Path, ...]:
    names = sorted(set(_weight_map(folder).values()))
    for name in names:
        if not _SHARD.fullmatch(name):
            raise ModelError(f"{name!r} is no plain name of a .safetensors file beside it", where=str(folder / INDEX))
        if not (folder / name).is_file():
            raise ModelError(f"the shard {name} is missing", where=str(folder), hint="copy or download it again")
    return tuple(_inside(folder, name) for name in names)


def _weight_map(folder: Path) -> dict[str, str]:
    """The index: tensor -> name of its shard."""
    path = _inside(folder, INDEX)
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError("the index has no weight_map", where=str(path))
    return {str(tensor): str(shard) for tensor, shard in weight_map.items()}


def _check_placed(folder: Path, tensors: tuple[TensorEntry, ...]) -> None:
    held = {(entry.name, entry.file.name) for entry in tensors}
    for tensor, shard in _weight_map(folder).items():
        if (tensor, shard) not in held:
            raise ModelError(f"tensor {tensor!r} should be in {shard}, which lacks it", where=str(folder / INDEX))


def _inside(folder: Path, name: str) -> Path:
    """`folder / name`, which must not be a link that leads out of the model."""
    root = folder.resolve()
    if root.parent.name == "snapshots" and root.parents[1].name.startswith("models--"):
        root = root.parents[1]  # a snapshot of a Hugging Face cache: links to ../../blobs
    if not (folder / name).resolve().is_relative_to(root):
        raise ModelError(
            f"{name} is a link that leads out of the folder", where=str(folder), hint="copy the file there"
        )
    return folder / name
