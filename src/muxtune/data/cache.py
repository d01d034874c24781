"""Token tables on disk, keyed by content.

An entry (private_cache.py) is named by the SHA-256 of everything that decides its content: the data file's bytes, the
declared shape, the renderer (tokenizer, template, settings), and the code of this package - so an entry can be absent,
never stale. Its body is safetensors.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import cast

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from muxtune.data.private_cache import PrivateCache
from muxtune.data.tokens import TokenizedFile, TokenTable
from muxtune.data.types import Shape

DEFAULT_LIMIT_BYTES = 4 << 30


def cache_key(*, file_sha256: str, declared: Shape | None, renderer: str) -> str:
    """The name of an entry. `renderer` is the renderer's fingerprint."""
    parts = {"file": file_sha256, "declared": declared, "renderer": renderer, "code": _code_fingerprint()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class TokenCache(PrivateCache[TokenizedFile]):
    """Tokenised files in one folder."""

    what, suffix = "token cache", ".tokens"

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        super().__init__(folder, limit_bytes)

    def encode(self, entry: TokenizedFile) -> bytes:
        return _encode(entry)

    def decode(self, body: bytes) -> TokenizedFile | None:
        return _decode(body)


def _encode(file: TokenizedFile) -> bytes:
    table = file.table
    about = json.dumps({"shape": file.shape, "sha256": file.sha256, "system": file.system, "chat": file.chat})
    tensors = {"ids": table.ids, "mask": table.mask, "starts": table.starts, "lines": table.lines}
    tensors["about"] = np.frombuffer(about.encode(), dtype=np.uint8)
    body: bytes = safetensors.numpy.save({name: np.ascontiguousarray(array) for name, array in tensors.items()})
    return body


def _decode(body: bytes) -> TokenizedFile | None:
    try:
        arrays = safetensors.numpy.load(body)
        about = json.loads(arrays["about"].tobytes())
        table = TokenTable(arrays["ids"], arrays["mask"], arrays["starts"], arrays["lines"])
        return TokenizedFile(table, cast("Shape", about["shape"]), about["sha256"], about["system"], about["chat"])
    except (SafetensorError, KeyError, ValueError):
        return None


@cache
def _code_fingerprint() -> str:
    """Of the code that turns bytes into tokens: an entry made by another version of it is simply not found."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    for package in ("tokenizers", "jinja2"):
        digest.update(f"{package}={version(package)}".encode())
    return digest.hexdigest()
