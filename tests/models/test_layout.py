"""A model folder is untrusted input: everything that could run code, lead out of it or lie about sizes is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from muxtune.errors import ModelError
from muxtune.models.layout import INDEX, check_folder
from muxtune.models.safetensors_file import MAX_HEADER_BYTES, hash_entries, read_entries


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def sharded(folder: Path) -> Path:
    """The same weights in two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"part-1.safetensors": names[::2], "part-2.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return folder


def edit(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_sound_folder_passes_with_all_its_tensors(folder: Path) -> None:
    layout = check_folder(folder)
    assert layout.model_type == "llama"
    assert {entry.name for entry in layout.tensors} == set(load_file(folder / "model.safetensors"))


def test_shards_hold_the_same_tensors_and_hash_alike(folder: Path) -> None:
    whole = check_folder(folder)
    expected = hash_entries(whole.tensors)
    parts = check_folder(sharded(folder))
    assert len(parts.weight_files) == 2
    assert hash_entries(parts.tensors) == expected


def test_the_hash_sees_a_bit_a_name_and_a_shape(tmp_path: Path) -> None:
    base = torch.arange(12, dtype=torch.float32)
    flipped = base.clone()
    flipped.view(torch.int32)[5] ^= 1
    variants = {
        "base": {"a": base, "b": base + 1},
        "bit": {"a": flipped, "b": base + 1},
        "names swapped": {"b": base, "a": base + 1},
        "shape": {"a": base.reshape(3, 4), "b": base + 1},
        "type": {"a": base.view(torch.int32), "b": base + 1},
        "boundary": {"a": torch.cat([base, (base + 1)[:1]]), "b": (base + 1)[1:]},
    }
    digests = set()
    for name, tensors in variants.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
        digests.add(hash_entries(read_entries(tmp_path / f"{name}.safetensors")))
    assert len(digests) == len(variants)


class Canary:
    """A pickle that leaves a trace when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.trace),))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_and_never_read(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Canary(tmp_path / "trace")))
    with pytest.raises(ModelError, match="pickle"):
        check_folder(folder)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_config_with_code_of_its_own_is_refused(file: str, folder: Path) -> None:
    edit(folder / file, lambda config: config.update(auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}))
    with pytest.raises(ModelError, match="auto_map"):
        check_folder(folder)


def test_each_kind_of_unusable_folder_says_why(folder: Path) -> None:
    spoils: list[tuple[Callable[[Path], object], str]] = [
        (lambda f: edit(f / "config.json", lambda c: c.update(quantization_config={"bits": 4})), "quantised"),
        (lambda f: edit(f / "config.json", lambda c: c.pop("model_type")), "model_type"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "not valid JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights"),
        (lambda f: (f / "adapter_config.json").write_text("{}"), "adapter"),
    ]
    for number, (spoil, message) in enumerate(spoils):
        copy = Path(shutil.copytree(folder, folder.with_name(f"copy-{number}")))
        spoil(copy)
        with pytest.raises(ModelError, match=message):
            check_folder(copy)


@pytest.mark.parametrize(
    "shard", ["../model/part-1.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "x.bin", "a\0.safetensors", ""]
)
def test_an_index_cannot_lead_out_of_the_folder(shard: str, folder: Path) -> None:
    sharded(folder)
    edit(folder / INDEX, lambda index: index["weight_map"].update({"model.norm.weight": shard}))  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match="no plain name"):
        check_folder(folder)


def test_an_index_that_names_what_is_not_there_is_refused(folder: Path) -> None:
    sharded(folder)
    edit(folder / INDEX, lambda index: index["weight_map"].update({"model.extra.weight": "part-1.safetensors"}))  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match=r"model\.extra\.weight"):
        check_folder(folder)
    (folder / "part-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"part-2\.safetensors is missing"):
        check_folder(folder)


def test_a_link_out_of_the_folder_is_refused_but_not_within_a_hub_cache(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--someone--tiny"
    snapshot = repository / "snapshots" / "abc"
    shutil.copytree(folder, snapshot)
    (repository / "blobs").mkdir()
    (snapshot / "model.safetensors").rename(repository / "blobs" / "123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    check_folder(snapshot)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(repository / "blobs" / "123")
    with pytest.raises(ModelError, match="leads out"):
        check_folder(folder)


def write_safetensors(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        ({}, b"", 1 << 40, "truncated"),
        ({}, b"x" * 100, MAX_HEADER_BYTES + 1, "truncated"),
        (b"not json", b"", None, "not JSON"),
        (b"[" * 100_000, b"", None, "not JSON"),
        ([], b"", None, "not a JSON object"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234567", None, "truncated"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"123456789", None, "longer than"),
        ({"a": {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 8]}}, b"12345678", None, "shape"),
        ({"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}, b"12345678", None, "no list of sizes"),
        ({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, b"12345678", None, "no list of sizes"),
        ({"a": {"dtype": "PICKLE", "shape": [2], "data_offsets": [0, 8]}}, b"12345678", None, "unknown type"),
        ({"a": {"dtype": "U8", "shape": [8], "data_offsets": [-8, 0]}}, b"12345678", None, "shape"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}, b"12345678", None, "gap"),
        ({"a": 5}, b"", None, "not described"),
    ],
)
def test_a_header_that_lies_is_refused(
    header: object, data: bytes, length: int | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read_entries(write_safetensors(tmp_path / "a.safetensors", header, data, length))


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    entry = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
    with pytest.raises(ModelError, match="overlaps"):
        read_entries(write_safetensors(tmp_path / "a.safetensors", {"a": entry, "b": entry}, b"12345678"))


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 1, exclude_max=True))
def test_every_prefix_of_a_file_is_refused(cut: float, tiny_llama: Path, tmp_path: Path) -> None:
    data = (tiny_llama / "model.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(data[: int(len(data) * cut)])
    with pytest.raises(ModelError):
        read_entries(tmp_path / "a.safetensors")
