"""PiSSA beside an untouched weight against peft's own, which takes the principal components out of it."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from muxtune.engine.engine import Engine
from muxtune.engine.task import Sequences
from muxtune.errors import AdapterError
from muxtune.models.backbone import Backbone
from muxtune.peft.base import Adapter
from muxtune.peft.pissa import PissaAdapter
from muxtune.peft.registry import build_adapter
from muxtune.spec.peft import Lora
from tests.engine.build import CPU, backbone_of, run
from tests.engine.prompts import PeftTrial
from tests.peft.adapters import some_ids
from tests.peft.frozen import FrozenLinear
from tests.reference_linears import LinearTask, train_steps
from tests.tiny import tiny_model

SPEC = Lora(r=4, lora_alpha=6, init_lora_weights="pissa")


def _built(backbone: Backbone, spec: Lora = SPEC) -> PissaAdapter:
    adapter = build_adapter(spec, backbone, seed=0, dtype=backbone.dtype, device=CPU)
    assert isinstance(adapter, PissaAdapter)
    return adapter


@pytest.mark.parametrize("arch", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_it_starts_where_pefts_does(arch: str, use_rslora: bool) -> None:
    """Singular vectors have a sign of their own choice: products are compared, s B A with s B A and what is left."""
    spec = Lora(r=4, lora_alpha=6, use_rslora=use_rslora, init_lora_weights="pissa")
    adapter, base = _built(backbone_of(arch), spec), tiny_model(arch)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=6, use_rslora=use_rslora, init_lora_weights="pissa",
        target_modules=sorted(adapter.modules), fan_in_fan_out=arch == "gpt2",
    )  # fmt: skip
    tuned = peft.get_peft_model(copy.deepcopy(base), config).base_model.model
    for name, (a_RI, b_OR) in adapter.pairs().items():
        theirs = tuned.get_submodule(name)
        own = spec.scaling * b_OR @ a_RI
        delta = theirs.get_delta_weight("default")
        residual, weight = theirs.base_layer.weight, base.get_submodule(name).weight
        if isinstance(theirs.base_layer, Conv1D):
            delta, residual, weight = delta.T, residual.T, weight.T
        torch.testing.assert_close(own, delta, rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(weight - own, residual, rtol=1e-4, atol=2e-6)
        singular = torch.linalg.svdvals(weight.double())
        torch.testing.assert_close(torch.linalg.svdvals(own.double())[:4], singular[:4], rtol=1e-5, atol=0)


def test_it_trains_as_pefts_own_does() -> None:
    """Peft's own decomposition and residual weight, in fp32; the shared weight here is not touched."""
    trial = PeftTrial("pissa", SPEC, [4, 13, 21, 9], batch=2, steps=4)
    backbone = backbone_of("llama")
    engine = Engine(backbone)
    weights = {name: op.weight.clone() for name, op in backbone.attach_points.items()}
    task = engine.attach(trial.job, Sequences(trial.examples))
    losses = [step.loss for step in run(engine)["pissa"]]
    assert isinstance(task.adapter, PissaAdapter)

    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=6, init_lora_weights="pissa", target_modules=sorted(weights)
    )
    tuned = peft.get_peft_model(tiny_model("llama"), config).eval()
    theirs = train_steps(tuned, LinearTask(SPEC, trial.batches, {}, trial.learning_rate))
    assert losses == pytest.approx(theirs.losses, rel=1e-4)
    assert losses[-1] < losses[0]
    for name, (a_RI, b_OR) in task.adapter.pairs().items():
        other = theirs.values[f"{name}.lora_B"] @ theirs.values[f"{name}.lora_A"]
        torch.testing.assert_close(b_OR @ a_RI, other, rtol=1e-2, atol=2e-4)
        assert torch.equal(backbone.attach_points[name].weight, weights[name])


def test_the_plain_pair_is_the_difference_and_lives_with_the_values() -> None:
    adapter = _built(backbone_of("llama", torch.float64))
    for a_2RI, b_O2R in adapter.plain_pairs().values():
        assert a_2RI.shape[0] == b_O2R.shape[1] == 8
        assert not (b_O2R @ a_2RI).abs().max() > 1e-12, "nothing has been learnt yet"
    name, (_, b_OR) = next(iter(adapter.pairs().items()))
    b_OR += 1
    a_2RI, b_O2R = adapter.plain_pairs()[name]
    torch.testing.assert_close(b_O2R @ a_2RI, torch.ones_like(b_OR) @ adapter.pairs()[name][0])


def test_where_the_pair_started_travels_with_it() -> None:
    """Another machine's singular vectors may be others: with the state goes what it is the difference from."""
    one, other = _built(backbone_of("llama")), _built(backbone_of("llama"))
    flipped = {name: -value for name, value in one.state().items()}
    other.load(flipped)
    ids = some_ids()
    assert all(torch.equal(value, flipped[name]) for name, value in other.state().items())
    assert _effect(one, ids) == pytest.approx(0, abs=1e-6) and _effect(other, ids) == pytest.approx(0, abs=1e-6)
    assert all(tensor.is_contiguous() for tensor in one.state().values())


def _effect(adapter: Adapter, ids: Tensor) -> float:
    found = []
    for name, module in adapter.modules.items():
        a_RI = adapter.parameters.views[f"{name}.lora_A"]
        x = torch.randn(ids.numel(), a_RI.shape[1], generator=torch.Generator().manual_seed(1))
        y = torch.zeros(ids.numel(), adapter.parameters.views[f"{name}.lora_B"].shape[0])
        module.forward_rows(x, y, None)
        found.append(float(y.abs().max()))
    return max(found)


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 32), (32, 8)])
def test_more_components_than_the_weight_has_are_refused(inputs: int, outputs: int) -> None:
    op = FrozenLinear("op", inputs, outputs, dtype=torch.float32)
    settings = {"scale": 1.0, "dropout": 0.0, "dtype": torch.float32, "device": CPU}
    assert PissaAdapter([op], r=8, **settings).pairs()["op"][0].shape == (8, inputs)
    with pytest.raises(AdapterError, match="wants 9 principal components, the weight has 8"):
        PissaAdapter([op], r=9, **settings)
