"""Models of the Hugging Face hub: found in a local cache, or downloaded where there is a network.

The boundary: a name in, a snapshot folder out; whether the folder may be loaded is `layout`'s business. Only weights
in safetensors, JSON, tokenizer files and templates are asked for, so no pickle or code is ever fetched. A snapshot
that is already there, in MuxTune's cache or in Hugging Face's own, is taken as it is: a run tomorrow trains on the
weights of today. `refresh` (muxtune models pull) asks the hub for the newest.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from muxtune.errors import ModelError
from muxtune.models.cache import private_folder

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
WANTED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
)


def hub_offline() -> bool:
    """What HF_HUB_OFFLINE asks for."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def snapshot(name: str, cache_dir: Path, *, offline: bool, refresh: bool = False) -> Path:
    """The folder of the hub model `name`. Raises ModelError where it is neither cached nor to be had."""
    if not (refresh and not offline):
        for hub_cache in _caches(cache_dir):
            folder = _cached(name, hub_cache)
            if folder is not None:
                return folder
    if offline:
        hint = "unset HF_HUB_OFFLINE to download it, or give a local folder"
        raise ModelError("this hub model is not in the cache, and the hub is switched off", where=name, hint=hint)
    return _download(name, private_folder(private_folder(cache_dir) / "hub"))


def cached(cache_dir: Path) -> tuple[tuple[str, Path], ...]:
    """Name and snapshot of each hub model in MuxTune's own cache."""
    hub_cache = cache_dir / "hub"
    folders = sorted(hub_cache.glob("models--*--*"))
    names = [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]
    found = [(name, _cached(name, hub_cache)) for name in names]
    return tuple((name, folder) for name, folder in found if folder is not None)


def _caches(cache_dir: Path) -> tuple[Path, ...]:
    from huggingface_hub.constants import HF_HUB_CACHE

    return (cache_dir / "hub", Path(HF_HUB_CACHE))


def _cached(name: str, hub_cache: Path) -> Path | None:
    """A snapshot with its config and weights; a download that was cut short is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, cache_dir=hub_cache, local_files_only=True, allow_patterns=list(WANTED)))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    whole = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return folder if whole else None


def _download(name: str, hub_cache: Path) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, cache_dir=hub_cache, allow_patterns=list(WANTED)))
    except GatedRepoError as error:
        hint = "accept its terms on the hub and set HF_TOKEN"
        raise ModelError("this hub model asks for a login", where=name, hint=hint) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        hint = "check the name on the hub; a private model needs HF_TOKEN"
        raise ModelError("there is no such hub model", where=name, hint=hint) from error
    except (OSError, RuntimeError) as error:  # connection, time-out, disk; httpx's errors come as one of these
        hint = "check the network, or give a local folder"
        raise ModelError(f"cannot download it: {_first_line(error)}", where=name, hint=hint) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
