"""A GGUF file becomes exactly the model and the tokenizer that were put into it, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from muxtune.errors import ModelError
from muxtune.models.gguf import check_convertible, convert
from muxtune.models.gguf_header import read_header
from tests.models.tiny_gguf import tiny_gguf_model, write_tiny_gguf

Q4_1 = gguf.GGMLQuantizationType.Q4_1


def converted(path: Path, dest: Path) -> Path:
    header = read_header(path)
    check_convertible(header)
    dest.mkdir()
    convert(header, dest, "someone/tiny")
    return dest


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_gguf_model("llama"))


@pytest.fixture(scope="module")
def llama_folder(llama_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(llama_file, tmp_path_factory.mktemp("converted") / "llama")


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_model_that_comes_out_is_the_one_that_went_in(arch: str, tied: bool, tmp_path: Path) -> None:
    model = tiny_gguf_model(arch, tied=tied)
    folder = converted(write_tiny_gguf(tmp_path / "a.gguf", model, pre="qwen2"), tmp_path / "a")
    again = AutoModelForCausalLM.from_pretrained(folder)
    ours, theirs = dict(again.named_parameters()), dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_quantised_weights_are_dequantised_as_the_format_says(tmp_path: Path) -> None:
    model = tiny_gguf_model("llama")
    path = write_tiny_gguf(tmp_path / "a.gguf", model, kind=Q4_1)
    header = read_header(path)
    dest = tmp_path / "a"
    dest.mkdir()
    assert convert(header, dest, "someone/tiny").note == "dequantised Q4_1"
    again = dict(AutoModelForCausalLM.from_pretrained(dest).named_parameters())
    name = "model.layers.1.mlp.down_proj.weight"
    weight = dict(model.named_parameters())[name].detach().numpy()
    expected = gguf.dequantize(gguf.quantize(weight, Q4_1), Q4_1)
    assert np.array_equal(again[name].detach().numpy(), expected)
    assert not np.array_equal(weight, expected)


def test_the_folder_names_no_source_and_ties_its_head(llama_folder: Path, llama_file: Path) -> None:
    config = json.loads((llama_folder / "config.json").read_bytes())
    assert "quantization_config" not in config
    assert config["rms_norm_eps"] == 1e-5  # not its float32 neighbour 9.999999747378752e-06
    assert config["rope_parameters"]["rope_theta"] == 5e4
    assert config["tie_word_embeddings"] and config["architectures"] == ["LlamaForCausalLM"]
    from safetensors import safe_open

    with safe_open(llama_folder / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - no mapping, has only keys()
    for file in llama_folder.iterdir():
        assert str(llama_file.parent).encode() not in file.read_bytes(), file.name


def test_smollm_splits_numbers_into_digits_and_nothing_else_changes(llama_folder: Path, tmp_path: Path) -> None:
    plain = converted(write_tiny_gguf(tmp_path / "b.gguf", tiny_gguf_model("llama"), pre="gpt-2"), tmp_path / "b")
    digits = AutoTokenizer.from_pretrained(llama_folder)
    whole = AutoTokenizer.from_pretrained(plain)
    assert len(whole("1234").input_ids) == 1  # the merges would make one token of it
    assert digits.convert_ids_to_tokens(digits("1234").input_ids) == ["1", "2", "3", "4"]
    assert digits.convert_ids_to_tokens(digits("a 12").input_ids) == ["a", "Ġ", "1", "2"]
    for text in ("hello hello", " hello\n\n  x", "it's\tnaïve 漢字 😀", "<|im_start|>user\nhello<|im_end|>\n"):
        assert digits(text).input_ids == whole(text).input_ids
        assert digits.decode(digits(text).input_ids) == text
    # Not only through transformers: whoever reads tokenizer.json itself gets the same.
    assert Tokenizer.from_file(str(llama_folder / "tokenizer.json")).encode("1234").tokens == ["1", "2", "3", "4"]


def test_qwen2_composes_unicode(llama_folder: Path, tmp_path: Path) -> None:
    folder = converted(write_tiny_gguf(tmp_path / "q.gguf", tiny_gguf_model("qwen2"), pre="qwen2"), tmp_path / "q")
    composed, decomposed = "\u00c5", "A\u030a"
    qwen, other = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(llama_folder)
    assert qwen(decomposed).input_ids == qwen(composed).input_ids
    assert other(decomposed).input_ids != other(composed).input_ids


def test_special_tokens_and_template_are_carried_over(llama_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        1,
        2,
        2,
        0,
    )
    assert tokenizer.model_max_length == 128
    assert tokenizer("hello").input_ids == tokenizer("hello", add_special_tokens=False).input_ids
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n"
    assert tokenizer("<|im_end|>").input_ids == [2]


@pytest.mark.parametrize(("eos", "ends"), [(2, 2), (0, [0, 2])])
def test_the_end_of_turn_is_among_the_eos_ids(eos: int, ends: int | list[int], tmp_path: Path) -> None:
    folder = converted(write_tiny_gguf(tmp_path / "e.gguf", tiny_gguf_model("llama"), eos=eos), tmp_path / "e")
    assert GenerationConfig.from_pretrained(folder).eos_token_id == ends
    assert AutoConfig.from_pretrained(folder).eos_token_id == eos


@pytest.mark.parametrize(
    ("keys", "tensors", "pre", "named"),
    [
        ({"llama.rope.scaling.factor": 8.0}, {}, "smollm", "llama.rope.scaling.factor"),
        ({"llama.attention.sliding_window": 8.0}, {}, "smollm", "llama.attention.sliding_window"),
        ({}, {"rope_freqs.weight": np.ones(8, np.float32)}, "smollm", "rope_freqs.weight"),
        ({}, {}, "llama-bpe", "gpt2/llama-bpe"),
        ({}, {}, "", "gpt2"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(
    keys: dict[str, float], tensors: dict[str, np.ndarray], pre: str, named: str, tmp_path: Path
) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", tiny_gguf_model("llama"), keys=keys, tensors=tensors, pre=pre)
    with pytest.raises(ModelError, match=named):
        check_convertible(read_header(path))


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    model = tiny_gguf_model("llama")
    model.config.model_type = "mamba"
    with pytest.raises(ModelError, match="'mamba'"):
        check_convertible(read_header(write_tiny_gguf(tmp_path / "a.gguf", model)))


def test_a_tensor_that_is_missing_is_never_made_up(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", tiny_gguf_model("llama"), leave_out="blk.1.ffn_up.weight")
    (tmp_path / "a").mkdir()
    with pytest.raises(ModelError, match="up_proj"):
        convert(read_header(path), tmp_path / "a", "someone/tiny")


def test_heads_of_another_width_than_transformers_assumes_are_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", tiny_gguf_model("llama"), keys={"llama.attention.key_length": 32.0})
    (tmp_path / "a").mkdir()
    with pytest.raises(ModelError, match=r"attention\.key_length is 32"):
        convert(read_header(path), tmp_path / "a", "someone/tiny")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 1, exclude_max=True))
def test_every_prefix_of_a_file_is_called_damaged(cut: float, llama_file: Path, tmp_path: Path) -> None:
    data = llama_file.read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(data[: int(len(data) * cut)])
    with pytest.raises(ModelError):
        read_header(short)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.integers(0, 9000), value=st.integers(0, 2**64 - 1))
def test_a_header_that_lies_raises_nothing_but_a_model_error(
    where: int, value: int, llama_file: Path, tmp_path: Path
) -> None:
    data = bytearray(llama_file.read_bytes())
    data[where : where + 8] = value.to_bytes(8, "little")
    lying = tmp_path / "lying.gguf"
    lying.write_bytes(data)
    try:
        read_header(lying)
    except ModelError as error:
        assert error.where == str(lying)
