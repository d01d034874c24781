"""Folders of prefix and prompt tuning: peft loads ours and we read peft's; a stranger's are judged before they are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, PrefixTuningConfig, get_peft_model
from peft.utils import PeftType
from safetensors.torch import load_file, save_file
from torch import Tensor

from muxtune.data.types import TokenSequence
from muxtune.engine.engine import Engine
from muxtune.errors import AdapterError
from muxtune.peft.check_vllm import check_vllm
from muxtune.peft.folder import write_adapter
from muxtune.peft.registry import TYPES, MergeableType, payload, read_stored, start_from
from muxtune.spec.peft import Lora, PrefixTuning, PromptTuning
from tests.engine.build import backbone_of, exact
from tests.engine.prompts import ARCHS, LONG_PREFIX, LONG_PROMPT, PREFIX, PROMPT, TENSOR, PeftTrial, attach
from tests.peft.adapters import MANIFEST, some_ids
from tests.reference_prompts import peft_as_it_is, prompt_of, with_prompt
from tests.tiny import tiny_model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TRIALS = {trial.name: trial for trial in (PREFIX, LONG_PREFIX, PROMPT, LONG_PROMPT)}


def _write(arch: str, trial: PeftTrial, folder: Path) -> Path:
    """The trial's adapter, not at its start, as a folder."""
    backbone = backbone_of(arch)
    adapter = attach(Engine(backbone), trial).adapter
    adapter.load({name: value * 0.5 + 0.1 for name, value in adapter.state().items()})
    write_adapter(folder, payload(trial.peft, adapter, backbone), MANIFEST)
    return folder


def _our_logprobs(arch: str, trial: PeftTrial, folder: Path) -> list[Tensor]:
    """Of every token but the first, in fp64, from what our reader reads."""
    with exact(torch.float64):
        backbone = backbone_of(arch, torch.float64)
        engine = Engine(backbone)
        task = attach(engine, trial)
        start_from(trial.peft, task.adapter, folder, backbone, base_sha256=None)
        found = []
        for ids in some_ids():
            ids_T, mask_T = ids.numpy().astype("int32"), torch.ones(len(ids), dtype=torch.bool).numpy()
            mask_T[0] = False
            logprobs = engine.forward({task: [TokenSequence(0, ids_T, mask_T)]})[task.name].logprobs
            assert logprobs is not None
            found.append(torch.tensor(logprobs, dtype=torch.float64))
    return found


def _logprobs(tuned: PeftModel) -> list[Tensor]:
    with peft_as_it_is(), torch.no_grad(), exact(torch.float64):
        scores = tuned(input_ids=some_ids(), attention_mask=torch.ones_like(some_ids())).logits.log_softmax(-1)
    own = scores[:, -some_ids().shape[1] :]  # peft's prompts have rows, and so logits, of their own
    return [rows_TV[:-1].gather(-1, ids[1:, None])[:, 0] for rows_TV, ids in zip(own, some_ids(), strict=True)]


@pytest.mark.parametrize("name", TRIALS)
@pytest.mark.parametrize("arch", ARCHS)
def test_peft_loads_what_we_write_and_answers_alike(arch: str, name: str, tmp_path: Path) -> None:
    trial = TRIALS[name]
    folder = _write(arch, trial, tmp_path / "adapter")
    base = tiny_model(arch, dtype=torch.float64)
    tuned = PeftModel.from_pretrained(base, folder).eval()
    assert tuned.peft_config["default"].peft_type is PeftType[type(trial.peft).__name__.replace("T", "_T").upper()]
    loaded_PX = prompt_of(tuned)
    assert torch.equal(loaded_PX.float(), load_file(folder / WEIGHTS)[TENSOR])
    start = attach(Engine(backbone_of(arch)), trial).adapter.state()
    assert not torch.isclose(loaded_PX.float(), torch.cat(list(start.values()), dim=1)).any(), "still at its start"
    for ours, theirs in zip(_our_logprobs(arch, trial, folder), _logprobs(tuned), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", TRIALS)
@pytest.mark.parametrize("arch", ARCHS)
def test_we_read_what_peft_saves_and_answer_alike(arch: str, name: str, tmp_path: Path) -> None:
    trial = TRIALS[name]
    tuned = with_prompt(tiny_model(arch, dtype=torch.float64), trial.peft)
    prompt_of(tuned).data = torch.randn(prompt_of(tuned).shape, generator=torch.Generator().manual_seed(8)).double()
    tuned.save_pretrained(tmp_path)
    _in_fp32(tmp_path)
    stored = read_stored(tmp_path, backbone_of(arch), base_sha256="ef" * 32)
    assert stored.spec == trial.peft and stored.manifest is None
    for ours, theirs in zip(_our_logprobs(arch, trial, tmp_path), _logprobs(tuned), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-10)


def test_a_prefix_that_peft_trained_through_a_projection_is_read_as_what_it_came_to(tmp_path: Path) -> None:
    model = tiny_model("llama")
    config = PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=PREFIX.peft.lead, prefix_projection=True, encoder_hidden_size=24
    )
    with peft_as_it_is():
        tuned = get_peft_model(model, config).eval()
    tuned.save_pretrained(tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["prefix_projection"] is True
    again = PeftModel.from_pretrained(tiny_model("llama", dtype=torch.float64), tmp_path).eval()
    stored = read_stored(tmp_path, backbone_of("llama"), base_sha256=None)
    assert stored.spec == PREFIX.peft
    for ours, theirs in zip(_our_logprobs("llama", PREFIX, tmp_path), _logprobs(again), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", TRIALS)
def test_we_read_what_we_write_bit_for_bit(name: str, tmp_path: Path) -> None:
    trial, backbone = TRIALS[name], backbone_of("gemma2")
    folder = _write("gemma2", trial, tmp_path / "adapter")
    stored = read_stored(folder, backbone, base_sha256=MANIFEST.base.weights_sha256)
    task = attach(Engine(backbone), trial)
    start_from(trial.peft, task.adapter, folder, backbone, base_sha256=MANIFEST.base.weights_sha256)
    assert stored.spec == trial.peft and stored.manifest == MANIFEST
    for key, value in task.adapter.state().items():
        assert torch.equal(value, stored.values[key])
    again = payload(trial.peft, task.adapter, backbone).tensors[TENSOR]
    assert torch.equal(again, load_file(folder / WEIGHTS)[TENSOR])


def test_neither_merges_and_no_vllm_serves_it(tmp_path: Path) -> None:
    for trial in (PREFIX, PROMPT):
        assert not isinstance(TYPES[type(trial.peft)], MergeableType)
        folder = _write("llama", trial, tmp_path / trial.name)
        report = check_vllm(folder, backbone_of("llama").attach_points)
        assert not report.ok and any(problem.endswith("LoRA only is served") for problem in report.problems)


def test_a_task_takes_only_a_folder_of_its_own_kind_and_size(tmp_path: Path) -> None:
    backbone = backbone_of("llama")
    folder = _write("llama", PREFIX, tmp_path / "adapter")
    for peft in (PrefixTuning(num_virtual_tokens=6), PromptTuning(num_virtual_tokens=5), Lora()):
        task = attach(Engine(backbone), PeftTrial("other", peft, [5]))
        with pytest.raises(AdapterError, match="another adapter than the job's peft says"):
            start_from(peft, task.adapter, folder, backbone, base_sha256=None)
    with pytest.raises(AdapterError, match="other base weights"):
        read_stored(folder, backbone, base_sha256="ef" * 32)


def test_numbers_that_are_not_finite_are_neither_written_nor_read(tmp_path: Path) -> None:
    backbone = backbone_of("llama")
    for trial in (PREFIX, PROMPT):
        task = attach(Engine(backbone), trial)
        with torch.no_grad():
            task.adapter.parameters.values[3] = math.inf
        with pytest.raises(AdapterError, match="NaN or infinity"):
            payload(trial.peft, task.adapter, backbone)
        folder = _write("llama", trial, tmp_path / trial.name)
        _with_tensors(folder, lambda tensors: tensors[TENSOR].view(-1)[7].fill_(math.nan))
        with pytest.raises(AdapterError, match="NaN or infinity"):
            read_stored(folder, backbone, base_sha256=None)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "no count": ({"num_virtual_tokens": None}, "num_virtual_tokens must be"),
    "a count that is true": ({"num_virtual_tokens": True}, "num_virtual_tokens must be"),
    "a count beyond all": ({"num_virtual_tokens": 10**12}, "num_virtual_tokens must be"),
    "another count": ({"num_virtual_tokens": 4}, "need"),
    "another width": ({"token_dim": 64}, "token_dim is 64, this model's is"),
    "another width in words": ({"token_dim": "wide"}, "token_dim is 'wide', this model's is"),
    "other heads": ({"num_attention_heads": 16}, "num_attention_heads is 16, this model's is"),
    "another depth": ({"num_layers": 3}, "num_layers is 3, this model's is 2"),
    "two submodules": ({"num_transformer_submodules": 2}, "num_transformer_submodules = 2 is refused"),
    "another task": ({"task_type": "SEQ_2_SEQ_LM"}, "task_type"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "code": ({"auto_mapping": {"base_model_class": "os.system"}}, "auto_mapping"),
    "an unknown key": ({"cross_attention": True}, "unknown key 'cross_attention'"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [PREFIX.name, PROMPT.name])
def test_a_config_that_is_not_this_models_is_refused(name: str, change: str, tmp_path: Path) -> None:
    keys, message = CHANGES[change]
    folder = _write("llama", TRIALS[name], tmp_path / "adapter")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | keys))
    with pytest.raises(AdapterError, match=message) as caught:
        read_stored(folder, backbone_of("llama"), base_sha256=None)
    assert str(folder) in str(caught.value.where)


@pytest.mark.parametrize("name", [PREFIX.name, PROMPT.name])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.update(other=torch.ones(3)), "tensors do not fit"),
        (lambda tensors: tensors.clear(), "missing"),
        (lambda tensors: tensors.update({TENSOR: tensors[TENSOR].T.contiguous()}), "need"),
        (lambda tensors: tensors.update({TENSOR: tensors[TENSOR].double()}), "F64"),
    ],
    ids=["another tensor", "none", "turned", "fp64"],
)
def test_tensors_that_the_config_does_not_name_are_refused(
    name: str, change: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    folder = _write("llama", TRIALS[name], tmp_path / "adapter")
    _with_tensors(folder, change)
    with pytest.raises(AdapterError, match=message):
        read_stored(folder, backbone_of("llama"), base_sha256=None)


def test_where_training_began_from_is_of_no_matter(tmp_path: Path) -> None:
    """peft's prompts name a tokenizer and a text; nothing is ever loaded by that name."""
    folder = _write("llama", PROMPT, tmp_path / "adapter")
    config = json.loads((folder / CONFIG).read_text())
    keys = {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "SQL", "tokenizer_name_or_path": "/etc/passwd"}
    (folder / CONFIG).write_text(json.dumps(config | keys))
    assert read_stored(folder, backbone_of("llama"), base_sha256=None).spec == PROMPT.peft


def _in_fp32(folder: Path) -> None:
    """What peft keeps of a double model; its values are fp32's."""
    _with_tensors(folder, lambda tensors: tensors.update({TENSOR: tensors[TENSOR].float()}))


def _with_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
