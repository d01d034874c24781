"""Merging any mergeable type: the merged folder answers as peft's own merge of the same adapter, or is refused."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from muxtune.engine.merge import merge_adapter
from muxtune.errors import AdapterError
from muxtune.models.sources import ModelFolder
from muxtune.peft.folder import write_adapter
from muxtune.peft.registry import build_adapter, payload
from muxtune.spec.peft import PeftBase, PrefixTuning
from tests.engine.build import CPU, backbone_of
from tests.engine.linears import NAMES, start_state, trial_called
from tests.models.merging import load, model_folder
from tests.peft.adapters import MANIFEST, some_ids
from tests.tiny import tiny_folder

ARCHS = ("llama", "llama-tied", "gpt2", "opt", "qwen2")  # biases: gpt2 and opt everywhere, qwen2 at q, k and v


def written(arch: str, spec: PeftBase, state: dict[str, Tensor] | None, dest: Path) -> Path:
    backbone = backbone_of(arch)
    adapter = build_adapter(spec, backbone, seed=0, dtype=torch.float32, device=CPU)
    if state is not None:
        adapter.load(state)
    write_adapter(dest, payload(spec, adapter, backbone), MANIFEST)
    (dest / "training_manifest.json").unlink()  # which names other base weights
    return dest


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(some_ids()).logits
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ARCHS)
def test_merged_answers_as_pefts_own_merge(arch: str, name: str, tmp_path: Path) -> None:
    base = model_folder(tiny_folder(tmp_path / "base", arch), tmp_path)
    trial = trial_called(name)
    adapter = written(arch, trial.peft, start_state(backbone_of(arch), trial), tmp_path / "a")
    report = merge_adapter(adapter, base, tmp_path / "merged")

    merged = logits(load(tmp_path / "merged"))
    by_peft = peft.PeftModel.from_pretrained(load(base.path), adapter).merge_and_unload()
    torch.testing.assert_close(merged, logits(by_peft), rtol=1e-4, atol=1e-4)
    assert float((merged - logits(load(base.path))).abs().max()) > 0.05, "the adapter must matter"
    assert report.difference is not None and report.effect is not None
    assert report.difference < 1e-4 < 0.01 < report.effect
    targets = backbone_of(arch).ops.keys() & {
        point.rpartition(".")[0] for point in start_state(backbone_of(arch), trial)
    }
    ours, plain = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", base.path))
    changed = {key.rpartition(".")[0] for key, value in ours.items() if not torch.equal(value, plain[key])}
    assert changed == targets


def test_ia3_scales_the_bias_of_an_output_and_not_of_an_input(tmp_path: Path) -> None:
    base = model_folder(tiny_folder(tmp_path / "base", "opt"), tmp_path)
    trial = trial_called("ia3")
    state = start_state(backbone_of("opt"), trial)
    report = merge_adapter(written("opt", trial.peft, state, tmp_path / "a"), base, tmp_path / "merged")
    assert report.changed_tensors == 2 * (2 + 2 + 1)  # in each layer, k and v with their biases, fc2 without
    ours, plain = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", base.path))
    layer = "model.decoder.layers.1"
    scale = state[f"{layer}.self_attn.v_proj.ia3_l"]
    name = f"{layer}.self_attn.v_proj.bias"
    torch.testing.assert_close(ours[name], plain[name] * scale)
    assert torch.equal(ours[f"{layer}.fc2.bias"], plain[f"{layer}.fc2.bias"])


def refused(adapter: Path, base: ModelFolder, match: str) -> None:
    dest = base.path.parent / "merged"
    with pytest.raises(AdapterError, match=match):
        merge_adapter(adapter, base, dest)
    assert not dest.exists() and not list(dest.parent.glob(".*")), "a refused merge leaves nothing"


def test_what_is_no_change_of_weights_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    base = model_folder(tiny_folder(tmp_path / "base", "llama"), tmp_path)
    adapter = written("llama", PrefixTuning(num_virtual_tokens=3), None, tmp_path / "a")
    refused(adapter, base, r"a prefix_tuning adapter cannot be merged.*--format peft")


@pytest.mark.parametrize("name", ["lora", "dora", "ia3"])
def test_an_untrained_adapter_has_nothing_to_merge(name: str, tmp_path: Path) -> None:
    base = model_folder(tiny_folder(tmp_path / "base", "llama"), tmp_path)
    refused(written("llama", trial_called(name).peft, None, tmp_path / "a"), base, "changes no weight")


def test_an_adapter_of_other_base_weights_is_refused(tmp_path: Path) -> None:
    base = model_folder(tiny_folder(tmp_path / "base", "llama"), tmp_path)
    trial = trial_called("dora")
    adapter = written("llama", trial.peft, start_state(backbone_of("llama"), trial), tmp_path / "a")
    backbone = backbone_of("llama")
    fresh = build_adapter(trial.peft, backbone, seed=0, dtype=torch.float32, device=CPU)
    write_adapter(tmp_path / "b", payload(trial.peft, fresh, backbone), MANIFEST)
    refused(tmp_path / "b", base, "trained on other base weights")
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors[next(iter(tensors))].fill_(float("inf"))
    save_file(tensors, adapter / "adapter_model.safetensors")
    refused(adapter, base, "NaN or infinity")
