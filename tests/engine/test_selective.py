"""Bottleneck adapters, BitFit, norm tuning and SHiRA: what peft or the published equations train, in any company."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from muxtune.engine.engine import Engine
from muxtune.engine.task import Sequences
from muxtune.errors import AdapterError, ConfigError
from muxtune.peft.registry import build_adapter
from muxtune.spec.peft import BitFit, Bottleneck, LnTuning, Shira, read_peft
from tests.engine.build import CPU, backbone_of, exact
from tests.engine.prompts import PeftTrial
from tests.engine.selective import ARCHS, BESIDE, Result, attach, reference, relative, train, trials
from tests.reference_types import PlainResult
from tests.sequences import random_sequences

DTYPES = (torch.float32, torch.float64)
CASES = [(arch, trial.name) for arch in ARCHS for trial in trials(arch)]
ALSO = ("gemma2", "qwen3", "opt-350m")  # norms that scale by 1 + w, norms over heads, norms after the blocks


def _tasks(arch: str) -> tuple[PeftTrial, ...]:
    return (*trials(arch), *BESIDE)


@cache
def _together(arch: str, dtype: torch.dtype) -> dict[str, Result]:
    return train(backbone_of(arch, dtype), _tasks(arch))


@cache
def _reference(arch: str, name: str, dtype: torch.dtype) -> PlainResult:
    return reference(arch, _trial(arch, name), dtype)


def _trial(arch: str, name: str) -> PeftTrial:
    return next(trial for trial in trials(arch) if trial.name == name)


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_in_fp64_it_is_what_the_yardstick_trains(arch: str, name: str) -> None:
    ours, theirs = _together(arch, torch.float64)[name], _reference(arch, name, torch.float64)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-9)
    assert relative(ours.values, theirs.values) < 1e-9


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_in_fp32_it_errs_no_more_than_three_times_what_the_yardstick_does(arch: str, name: str) -> None:
    ours, theirs = _together(arch, torch.float32)[name], _reference(arch, name, torch.float32)
    truth = _reference(arch, name, torch.float64)
    assert _worst(ours.losses, truth.losses) < max(3 * _worst(theirs.losses, truth.losses), 1e-6)
    error = relative(ours.values, truth.values)
    assert error < max(3 * relative(theirs.values, truth.values), 2e-5)


@pytest.mark.parametrize(("arch", "name"), CASES)
def test_the_first_step_moves_every_tensor_that_has_a_gradient(arch: str, name: str) -> None:
    """All of them do, but for a key's bias: a shift of all keys alike shifts a query's scores alike, which the softmax
    does not see. Its gradient is rounding."""
    trial = _trial(arch, name)
    with exact(torch.float64):
        engine = Engine(backbone_of(arch, torch.float64))
        task = attach(engine, trial)
        start = task.adapter.parameters.export()
        engine.forward_backward({task: list(trial.batches[0])})
        gradients = {name: view.grad.clone() for name, view in task.adapter.parameters.views.items()}
        engine.optim_step(task, lr=1e-2)
    assert relative(gradients, _reference(arch, name, torch.float64).gradients) < 1e-12
    moved = task.adapter.parameters.export()
    still = [name for name, gradient in gradients.items() if float(gradient.abs().max()) < 1e-12]
    assert all(name.endswith("k_proj.bias") for name in still)
    assert all(not torch.equal(moved[name], start[name]) for name in gradients if name not in still)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_trained_together_is_trained_alone_bit_for_bit(arch: str, dtype: torch.dtype) -> None:
    """Whatever the others are, down to a co-runner's dropout."""
    backbone = backbone_of(arch, dtype)
    for trial in _tasks(arch):
        together, alone = _together(arch, dtype)[trial.name], train(backbone, [trial])[trial.name]
        assert together.losses == alone.losses and len(alone.losses) == trial.steps
        assert together.grad_norms == alone.grad_norms
        assert all(torch.equal(together.values[name], alone.values[name]) for name in alone.values)
        assert all(torch.equal(together.moments[name], alone.moments[name]) for name in alone.moments)
        assert relative(alone.values, alone.start) > 1e-3, "nothing was trained"


@pytest.mark.parametrize("arch", ARCHS)
def test_the_plain_twin_agrees(arch: str) -> None:
    plain = train(backbone_of(arch, torch.float64), _tasks(arch), plain=True)
    for name, fast in _together(arch, torch.float64).items():
        assert plain[name].losses == pytest.approx(fast.losses, rel=1e-10)
        assert relative(plain[name].values, fast.values) < 1e-9


def test_a_neighbours_nan_stays_in_its_own_rows() -> None:
    backbone, expected = backbone_of("llama"), _together("llama", torch.float32)
    for sick in [trial.name for trial in trials("llama")]:
        engine = Engine(backbone)
        for trial in _tasks("llama"):
            task = attach(engine, trial)
            if trial.name == sick:
                with torch.no_grad():
                    task.adapter.parameters.values.fill_(math.nan)
        record = engine.execute(engine.schedule([task.participant() for task in engine.tasks.values()]))
        losses = {action.step.task: action.step.loss for action in record.actions if action.step is not None}
        assert math.isnan(losses.pop(sick))
        assert losses == {name: expected[name].losses[0] for name in losses}


NAMES = ("houlsby", "pfeiffer", "parallel", "bitfit", "ln_tuning", "shira")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", (*ARCHS, *ALSO))
def test_a_fresh_adapter_leaves_the_function_as_it_is_and_is_what_the_spec_counts(arch: str, name: str) -> None:
    backbone = backbone_of(arch)
    spec = read_peft(name)
    if name == "parallel" and arch.startswith("opt"):
        pytest.skip("has no feed-forward module")
    engine = Engine(backbone)
    job = PeftTrial(name, spec, [9, 4]).job
    task = engine.attach(job, Sequences(random_sequences([9, 4], seed=1)))
    batch = list(random_sequences([12, 7], seed=2))
    (with_it,) = engine.forward({task: batch}).values()
    bare = engine.attach(PeftTrial("bare", read_peft("lora"), [9, 4]).job, Sequences(batch))
    (without,) = engine.forward({bare: batch}).values()
    assert with_it.logprobs == without.logprobs, "to the bit"
    count = task.adapter.parameters.count
    assert count == spec.parameters(backbone.places) > 0
    assert spec.unmatched(backbone.places) == ()
    assert spec.flops_per_token(backbone.places) > count
    held = task.adapter.parameters
    fixed_bytes = sum(tensor.numel() * tensor.element_size() for tensor in task.adapter.fixed.values())
    assert spec.state_bytes(backbone.places) == 4 * 4 * held.count + fixed_bytes


@pytest.mark.parametrize("name", NAMES)
def test_in_bf16_parameters_are_fp32_and_what_is_learned_is_near(name: str) -> None:
    low, full = backbone_of("llama", torch.bfloat16), backbone_of("llama")
    trial = PeftTrial(name, read_peft(name), [10, 25, 13, 4], steps=4)
    ours, truth = train(low, [trial])[name], train(full, [trial])[name]
    assert all(value.dtype == torch.float32 for value in ours.values.values())
    assert ours.losses == pytest.approx(truth.losses, rel=2e-2)
    twin = train(low, [trial], plain=True)[name]
    assert twin.losses == pytest.approx(ours.losses, rel=1e-2)


def test_the_seed_draws_the_places_of_shira() -> None:
    backbone = backbone_of("llama")

    def places(seed: int) -> dict[str, torch.Tensor]:
        return dict(build_adapter(Shira(), backbone, seed=seed, dtype=torch.float32, device=CPU).fixed)

    one, same, other = places(1), places(1), places(2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    q, v = (one[f"model.layers.{layer}.self_attn.q_proj.shira_indices"] for layer in (0, 1))
    assert not torch.equal(q, v), "each weight has places of its own"
    for name, places_2P in one.items():
        op = backbone.attach_points[name.removesuffix(".shira_indices")]
        flat_P = places_2P[0] * op.in_features + places_2P[1]
        assert bool((flat_P[1:] > flat_P[:-1]).all()), "row-major, none twice"
        assert int(flat_P[0]) >= 0 and int(flat_P[-1]) < op.in_features * op.out_features


def test_what_has_no_place_is_refused_and_says_what_has() -> None:
    opt, llama = backbone_of("opt"), backbone_of("llama")

    def build(spec: Bottleneck | BitFit | LnTuning | Shira, on: object = llama) -> None:
        build_adapter(spec, on, seed=1, dtype=torch.float32, device=CPU)

    with pytest.raises(AdapterError, match="placement parallel has no place") as caught:
        build(Bottleneck(placement="parallel"), opt)
    assert caught.value.hint == "possible here: houlsby, pfeiffer"
    assert Bottleneck(placement="parallel").unmatched(opt.places)
    with pytest.raises(AdapterError, match="match no norm"):
        build(LnTuning(target_modules=("q_proj",)))
    with pytest.raises(AdapterError, match="match no linear"):
        build(BitFit(target_modules=("input_layernorm",)))
    with pytest.raises(ConfigError, match="asks for"):
        build(Shira(r=40))
    with pytest.raises(ConfigError, match="asks for"):
        Shira(r=40).parameters(llama.places)


def _worst(ours: list[float], theirs: list[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))
