"""Adapter folders: what is written, and that nothing a stranger puts into one is run, followed or believed."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig

from muxtune.data.manifest import BaseIdentity, JsonValue, PromptFormat, TrainingManifest
from muxtune.errors import AdapterError
from muxtune.peft.convert import PREFIX
from muxtune.peft.folder import carried_files, generation_config, read_manifest, write_adapter
from muxtune.peft.lora_config import LoraFormat
from muxtune.peft.lora_convert import export_lora, read_lora
from muxtune.peft.untrusted import MAX_HEADER_BYTES
from tests.peft.adapters import MANIFEST, linear_sizes, module_names, random_pairs
from tests.tiny import tiny_model
from tests.tiny_tokenizer import CHATML, END_OF_TURN_ID

BASE = tiny_model("llama")
SIZES = linear_sizes(BASE)
PAIRS = random_pairs(SIZES, ("q_proj", "v_proj"))
PAYLOAD = export_lora(PAIRS, LoraFormat(4, 8), module_names=module_names(BASE))
FIRST = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "adapter", PAYLOAD, MANIFEST)
    return tmp_path / "adapter"


def edit_config(folder: Path, **changes: JsonValue) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def write_header(folder: Path, header: Mapping[str, object] | bytes, data: bytes = b"") -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def refused(folder: Path, match: str, **options: str) -> None:
    with pytest.raises(AdapterError, match=match):
        read_lora(folder, SIZES, **options)


# What is written


def test_the_folder_carries_all_that_it_needs(tmp_path: Path, tiny_llama: Path) -> None:
    dest = tmp_path / "out"
    write_adapter(dest, PAYLOAD, MANIFEST, model_folder=tiny_llama)

    config = json.loads((dest / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tests/tiny"
    assert read_manifest(dest) == MANIFEST
    tokenizer = AutoTokenizer.from_pretrained(dest)
    assert tokenizer.chat_template == CHATML
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=True)
    assert END_OF_TURN_ID in GenerationConfig.from_pretrained(dest).eos_token_id
    card = (dest / "README.md").read_text()
    for part in ("tests/tiny", "dequantised Q4_1", "ab" * 32, "sql.jsonl"):
        assert part in card
    assert not list(tmp_path.glob(".*")), "staging left behind"


def test_the_same_training_writes_the_same_bytes(tmp_path: Path, tiny_llama: Path) -> None:
    for name in ("a", "b"):
        write_adapter(tmp_path / name, PAYLOAD, MANIFEST, model_folder=tiny_llama)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)


def test_the_jobs_own_template_wins(tmp_path: Path, tiny_llama: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    write_adapter(tmp_path / "out", PAYLOAD, MANIFEST, model_folder=tiny_llama, chat_template=template)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == template


def test_stop_tokens_join_the_models_own(tmp_path: Path) -> None:
    assert generation_config(tmp_path, [5])["eos_token_id"] == [5]
    (tmp_path / "config.json").write_text('{"eos_token_id": 2, "bos_token_id": 1, "hidden_size": 8}')
    assert generation_config(tmp_path, [5]) == {"bos_token_id": 1, "eos_token_id": [5, 2]}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 5], "temperature": 0.6}')
    assert generation_config(tmp_path, [5]) == {"eos_token_id": [5, 9], "temperature": 0.6}


def test_what_a_merged_model_takes_from_the_folder(tmp_path: Path, tiny_llama: Path) -> None:
    write_adapter(tmp_path / "out", PAYLOAD, MANIFEST, model_folder=tiny_llama)
    names = {file.name for file in carried_files(tmp_path / "out")}
    assert names == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    (tmp_path / "out" / "vocab.json").symlink_to("/etc/hostname")
    with pytest.raises(AdapterError, match="symbolic link"):
        carried_files(tmp_path / "out")


def test_a_run_folder_keeps_its_other_files(folder: Path) -> None:
    (folder / "metrics.csv").write_text("step,loss\n")
    later = replace(MANIFEST, steps=48)
    write_adapter(folder, PAYLOAD, later)
    assert (folder / "metrics.csv").read_text() == "step,loss\n"
    assert read_lora(folder, SIZES).manifest == later


def test_a_death_while_writing_leaves_no_mixture(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old weights beside a new config would be an adapter that was never trained: the folder is incomplete instead."""
    moves = 0

    def die_at_second(source: Path, dest: Path, *, real: Callable[[Path, Path], None] = os.replace) -> None:
        nonlocal moves
        moves += 1
        if moves == 2:
            raise KeyboardInterrupt
        real(source, dest)

    monkeypatch.setattr(os, "replace", die_at_second)
    with pytest.raises(KeyboardInterrupt):
        write_adapter(folder, PAYLOAD, MANIFEST)
    refused(folder, "adapter_config.json is missing")
    monkeypatch.undo()
    write_adapter(folder, PAYLOAD, MANIFEST)
    assert read_lora(folder, SIZES).form.r == 4


def test_a_death_before_the_folder_is_there_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", die)
    with pytest.raises(KeyboardInterrupt):
        write_adapter(tmp_path / "out", PAYLOAD, MANIFEST)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "/home/someone/.cache/model", "~/model", "../model"])
def test_the_base_models_name_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(AdapterError, match="--base-name"):
        write_adapter(tmp_path / "out", PAYLOAD, replace(MANIFEST, base=BaseIdentity(name)))


def test_a_users_text_cannot_break_the_card(tmp_path: Path) -> None:
    named = replace(
        MANIFEST, job={"name": "x\n---\n<img src=x onerror=alert(1)>"}, base=BaseIdentity('a"\nlicense: mit')
    )
    write_adapter(tmp_path / "out", PAYLOAD, named)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "<img" not in card and "\nlicense" not in card and card.count("\n---\n") == 1


# Whose adapter it is


def test_another_bases_adapter_is_refused(folder: Path) -> None:
    assert read_lora(folder, SIZES, base_sha256="ab" * 32).base_name == "tests/tiny"
    refused(folder, "trained on other base weights: tests/tiny, dequantised Q4_1", base_sha256="ff" * 32)


def test_a_folder_without_our_manifest_is_taken(folder: Path) -> None:
    (folder / "training_manifest.json").write_text('{"made_by": "another tool"}')
    assert read_lora(folder, SIZES, base_sha256="ff" * 32).manifest is None


def drop(value: dict[str, JsonValue], key: str) -> None:
    del value[key]


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda m: drop(m, "base"), "base"),
        (lambda m: m["base"].update(name=3), "name"),
        (lambda m: m["prompt"].update(shape="pickle"), "shape"),
        (lambda m: m["prompt"].update(stop_token_ids=["x"]), "stop_token_ids"),
        (lambda m: m["prompt"].update(stop_token_ids="12"), "stop_token_ids"),
        (lambda m: m.update(datasets={}), "datasets"),
        (lambda m: m.update(datasets=[7]), "item"),
        (lambda m: m.update(steps=True), "steps"),
        (lambda m: m["versions"].update(torch=2), "torch"),
    ],
)
def test_a_damaged_manifest_is_named(folder: Path, edit: Callable[[dict[str, JsonValue]], None], match: str) -> None:
    path = folder / "training_manifest.json"
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))
    refused(folder, match)


def test_manifest_round_trip() -> None:
    text_only = TrainingManifest(BaseIdentity("n"), PromptFormat("text"), {}, (), 0, 0)
    for manifest in (MANIFEST, text_only):
        value = cast("dict[str, JsonValue]", json.loads(json.dumps(manifest.to_json())))
        assert TrainingManifest.from_json(value, where="m") == manifest


# Code


class Canary:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl"])
@pytest.mark.parametrize("beside", [True, False])
def test_a_pickle_is_refused_and_not_opened(folder: Path, tmp_path: Path, suffix: str, beside: bool) -> None:
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists(), "the trap must work, or the test proves nothing"
    canary.unlink()
    if not beside:
        (folder / "adapter_model.safetensors").unlink()
    (folder / f"adapter_model{suffix}").write_bytes(pickle.dumps(Canary(canary)))
    refused(folder, "pickle")
    assert not canary.exists()


def test_a_pickle_under_a_false_name_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (folder / "adapter_model.safetensors").write_bytes(pickle.dumps(Canary(canary)))
    refused(folder, "not a sound safetensors file")
    assert not canary.exists()


# Containers


def entry(shape: list[object], start: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({FIRST: entry([10**9, 10**9], 0, 4 * 10**18)}, b""),  # must not allocate
        ({FIRST: entry([4, 48], 0, 4)}, b"1234"),  # bytes do not hold the shape
        ({"a": entry([1], 0, 4), "b": entry([1], 2, 6)}, b"123456"),  # overlap
        ({"a": entry([1], 0, 4), "b": entry([1], 6, 10)}, b"1234567890"),  # hole
        ({"a": entry([1], 0, 4)}, b"12345678"),  # more data than tensors
        ({"a": entry([1], 0, 4)}, b""),  # less
        ({"a": entry([-1], 0, -4)}, b""),
        ({"a": entry([1.0], 0, 4)}, b"1234"),
        ({"a": entry([True], 0, 4)}, b"1234"),
        ({"a": entry([1], 0, 4, "Q4")}, b"1234"),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"1234"),
        ({"a": 3}, b""),
        (b"[]", b""),
        (b'{"a": 1, "a": 2}', b""),
        (b'{"a": NaN}', b""),
        (b"\xff\xfe", b""),
        (b'{"a":' * 5000, b""),
    ],
)
def test_a_lying_header_is_refused(folder: Path, header: Mapping[str, object] | bytes, data: bytes) -> None:
    write_header(folder, header, data)
    refused(folder, r"adapter_model.safetensors: not ")


@pytest.mark.parametrize("claim", [2**40, 2**63, 9 * 10**6])
def test_a_headers_length_is_bounded_before_it_is_read(folder: Path, claim: int) -> None:
    path = folder / "adapter_model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", claim))
        file.truncate(MAX_HEADER_BYTES + 2 * 10**6)  # sparse: as long as the last claim, and no disk used
    refused(folder, "header")


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_a_file_without_a_header_is_refused(folder: Path, content: bytes) -> None:
    (folder / "adapter_model.safetensors").write_bytes(content)
    refused(folder, "not a sound safetensors file")


@pytest.mark.parametrize(
    "content", ["", "[]", '{"r": 1, "r": 2}', '{"r": Infinity}', "{" * 5000, '{"r": ' + "9" * 5000]
)
def test_a_bad_config_file_is_refused(folder: Path, content: str) -> None:
    (folder / "adapter_config.json").write_text(content)
    refused(folder, "adapter_config.json")


def test_a_huge_config_is_refused_before_it_is_parsed(folder: Path) -> None:
    with (folder / "adapter_config.json").open("r+b") as file:
        file.truncate(2**33)
    refused(folder, "larger than")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "training_manifest.json"])
def test_links_and_pipes_are_not_followed(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    refused(folder, "symbolic link")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refused(folder, "not a regular file")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_incomplete_folder_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    refused(folder, f"{name} is missing")
    refused(folder / "nowhere", "no such folder")


# Content


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "PREFIX_TUNING"),
        ({"peft_type": None}, "peft_type"),
        ({"task_type": "SEQ_CLS"}, "task_type"),
        ({"use_dora": True}, "4 tensors are missing, the first is .*lora_magnitude_vector"),
        ({"use_dora": 1}, "use_dora"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"layer_replication": [[0, 4]]}, "layer_replication"),
        ({"auto_mapping": {"base_model_class": "X", "parent_library": "os"}}, "auto_mapping"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": 1}, "init_lora_weights"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"eva_config": {"rho": 2}}, "eva_config"),
        ({"use_something_new": True}, "use_something_new"),
        ({"target_modules": "(a+)+$"}, "pattern"),
        ({"target_modules": ["q_proj|v_proj"]}, "literal"),
        ({"target_modules": [".*"]}, "literal"),
        ({"target_modules": [["q_proj"]]}, "literal"),
        ({"target_modules": ["query_key_value"]}, "no linear layer of this model"),
        ({"target_modules": None}, "no linear layer of this model"),
        ({"exclude_modules": "q.*"}, "pattern"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform"),
        ({"layers_to_transform": True}, "layers_to_transform"),
        ({"layers_pattern": "(a+)+"}, "literal"),
        ({"r": 8}, "this model and adapter_config.json need"),
        ({"r": 0}, "r must be"),
        ({"r": 10**6}, "r must be"),
        ({"r": True}, "r must be"),
        ({"r": "4"}, "r must be"),
        ({"lora_alpha": -1}, "lora_alpha"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_dropout": 1.5}, "lora_dropout"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"target_modules": ["q_proj"]}, "do not select"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "missing"),
        ({"layers_to_transform": [0]}, "do not select"),
        ({"exclude_modules": ["v_proj"]}, "do not select"),
    ],
)
def test_a_config_is_believed_in_nothing(folder: Path, changes: dict[str, JsonValue], match: str) -> None:
    edit_config(folder, **changes)
    refused(folder, match)


@pytest.mark.parametrize(
    "changes",
    [
        {"a_key_of_a_newer_peft": None, "another": False, "third": {}, "fourth": []},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"exclude_modules": ["lm_head"]},
        {"target_modules": ["model.layers.0.self_attn.q_proj", "1.self_attn.q_proj", "self_attn.v_proj", "wte"]},
        {"task_type": None, "init_lora_weights": "gaussian", "use_dora": None},
    ],
)
def test_harmless_keys_are_taken(folder: Path, changes: dict[str, JsonValue]) -> None:
    edit_config(folder, **changes)
    assert read_lora(folder, SIZES).tensors.keys() == PAIRS.keys()


def test_all_linear_means_every_layer_but_the_head(tmp_path: Path) -> None:
    pairs = random_pairs(SIZES, ("_proj",))
    write_adapter(tmp_path / "a", export_lora(pairs, LoraFormat(4, 8), module_names=module_names(BASE)), MANIFEST)
    edit_config(tmp_path / "a", target_modules="all-linear")
    loaded = read_lora(tmp_path / "a", SIZES | {"lm_head": (48, 320)})
    assert loaded.tensors.keys() == pairs.keys()


def rename_first(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: tensors.pop(FIRST)})


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda t: t.pop(FIRST), "1 tensors are missing"),
        (lambda t: t.update({f"{PREFIX}lm_head.weight": torch.ones(2)}), "only tensors named"),
        (lambda t: t.update({f"{PREFIX}lm_head.lora_A.weight": torch.ones(4, 48)}), "no linear layer 'lm_head'"),
        (lambda t: t.update({f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.ones(4, 2)}), "embedding"),
        (lambda t: t.update({FIRST.replace("A.weight", "magnitude_vector.weight"): torch.ones(4)}), "DoRA"),
        (rename_first("model.layers.0.self_attn.q_proj.lora_A.weight"), "only tensors named"),
        (rename_first(f"{PREFIX}model.layers.9.self_attn.q_proj.lora_A.weight"), "no linear layer"),
        (rename_first(f"{PREFIX}../../q_proj.lora_A.weight"), "no linear layer"),
        (lambda t: t.update({FIRST: torch.ones(4, 47)}), "need"),
        (lambda t: t.update({FIRST: torch.ones(48, 4)}), "need"),
        (lambda t: t.update({FIRST: torch.ones(4, 48, dtype=torch.int32)}), "I32"),
        (lambda t: t.update({FIRST: torch.ones(4, 48, dtype=torch.float64)}), "F64"),
        (lambda t: t[FIRST].__setitem__((0, 0), float("nan")), "NaN or infinity"),
        (lambda t: t[FIRST].__setitem__((3, 47), float("-inf")), "NaN or infinity"),
    ],
)
def test_tensors_must_be_those_of_model_and_config(
    folder: Path, edit: Callable[[dict[str, torch.Tensor]], object], match: str
) -> None:
    edit_tensors(folder, edit)
    refused(folder, match)


def test_half_precision_becomes_fp32(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({name: tensor.half() for name, tensor in t.items()}))
    loaded = read_lora(folder, SIZES)
    for name, (lora_a_RI, lora_b_OR) in loaded.tensors.items():
        assert lora_a_RI.dtype == torch.float32
        assert torch.equal(lora_a_RI, PAIRS[name][0].half().float())
        assert torch.equal(lora_b_OR, PAIRS[name][1].half().float())


def test_max_rank_is_the_callers(folder: Path) -> None:
    assert read_lora(folder, SIZES, max_rank=4).form.r == 4
    with pytest.raises(AdapterError, match="from 1 to 3"):
        read_lora(folder, SIZES, max_rank=3)
