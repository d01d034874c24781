"""The tiny models are what the other tests take them for: real, deterministic, and sensitive to faults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import ARCHITECTURES, POSITIONS, SUPPORTED, WINDOW, tiny_config, tiny_folder, tiny_model
from tests.tiny_tokenizer import END_OF_TURN_ID, VOCAB, tiny_tokenizer


def _ids(length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_folder_loads_in_transformers_with_the_same_logits(arch: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / arch, arch, seed=3)
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    made = tiny_model(arch, seed=3, attention=loaded.config._attn_implementation)
    with torch.no_grad():
        assert torch.equal(loaded(_ids(20)).logits, made(_ids(20)).logits)
    assert loaded.generation_config.eos_token_id[0] == END_OF_TURN_ID
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi 7"}], tokenize=False)
    assert text == "<|im_start|>user\nHi 7<|im_end|>\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == END_OF_TURN_ID


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_vary_and_depend_on_every_earlier_token(arch: str) -> None:
    model = tiny_model(arch)
    ids = _ids(WINDOW - 2)
    with torch.no_grad():
        logits = model(ids).logits[0]
        assert 0.3 < logits.float().std() < 6
        for position in range(ids.shape[1]):
            other = ids.clone()
            other[0, position] = (other[0, position] + 7) % VOCAB
            changed = (model(other).logits[0] - logits).abs().amax(dim=-1)
            assert torch.all(changed[:position] == 0), "a later token changed an earlier row"
            assert torch.all(changed[position:] > 1e-5), "an earlier token does not reach a row"


def test_window_forgets_what_lies_outside_it() -> None:
    model = tiny_model("mistral", layers=1)
    ids = _ids(WINDOW + 6)
    other = ids.clone()
    other[0, 0] = (other[0, 0] + 7) % VOCAB
    with torch.no_grad():
        changed = (model(other).logits[0] - model(ids).logits[0]).abs().amax(dim=-1)
    assert torch.all(changed[:WINDOW] > 1e-5)
    assert torch.all(changed[WINDOW:] < 1e-5)


@pytest.mark.parametrize("arch", SUPPORTED)
def test_the_seed_alone_decides_and_fp64_is_the_fp32_model(arch: str) -> None:
    torch.manual_seed(1)
    first = dict(tiny_model(arch, seed=5).named_parameters())
    torch.manual_seed(2)
    again = dict(tiny_model(arch, seed=5, dtype=torch.float64).named_parameters())
    other = dict(tiny_model(arch, seed=6).named_parameters())
    assert first.keys() == again.keys()
    for name, parameter in first.items():
        assert again[name].dtype == torch.float64
        assert torch.equal(parameter.double(), again[name]), name
        assert not torch.equal(parameter, other[name]), name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_widths_are_multiples_of_16(arch: str) -> None:
    for name, parameter in tiny_model(arch).named_parameters():
        is_table = "position" in name or "wpe" in name  # OPT's position table has two rows more
        widths = parameter.shape[1:] if is_table else parameter.shape
        assert all(width % 16 == 0 for width in widths), (name, parameter.shape)
    assert tiny_config(arch).vocab_size == VOCAB == len(tiny_tokenizer())
    assert POSITIONS > 4 * WINDOW
