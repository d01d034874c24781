"""The engine on the fast block: the numbers of its twin, transformers' modules, and every promise of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from muxtune.engine.engine import Engine
from muxtune.engine.load import load_backbone
from muxtune.engine.local import LocalEngine
from muxtune.engine.task import Sequences
from muxtune.errors import ConfigError
from muxtune.models import attention
from muxtune.models.backbone import Backbone, BlockName
from muxtune.models.head_rows import SLICE_ROWS
from muxtune.models.sources import resolve
from muxtune.plan.types import MicroBatch
from muxtune.spec.peft import IA3, BitFit, LnTuning, Lora, PeftBase, PromptTuning
from tests.engine.build import attach as attach_lora
from tests.engine.build import backbone_of, exact, mixed_trials
from tests.engine.cast import cast
from tests.engine.counting import Products
from tests.engine.prompts import PeftTrial
from tests.engine.selective import Result, attach, relative, train
from tests.engine.test_cut import SPECS, _gradient
from tests.engine.test_decode import JOINS, _decode
from tests.peak import peak_bytes
from tests.tiny import tiny_config

ARCHS = ("llama", "qwen2", "qwen3", "mistral")
INPUTS = PeftTrial(
    "inputs", IA3(target_modules=("k_proj", "up_proj"), feedforward_modules=("k_proj", "up_proj")), [9, 4]
)
EXTRA = (
    replace(INPUTS, seed=15),  # modules that have a joined linear see other rows
    PeftTrial("ends", Lora(r=2, target_modules=("embed_tokens", "v_proj", "lm_head")), [7, 12], seed=16),
)


def _members(arch: str) -> tuple[PeftTrial, ...]:
    untied = () if arch == "qwen2" else EXTRA[1:]  # adapters on both of two tied ends are another test's affair
    return (*cast("llama"), EXTRA[0], *untied)


def _one_chunk(arch: str) -> list[PeftTrial]:
    return [replace(one, batch=len(one.lengths), chunk_tokens=None, weight_decay=0) for one in _members(arch)]


@cache
def _backbone(arch: str, dtype: torch.dtype, block: BlockName = "fast") -> Backbone:
    found = backbone_of(arch, dtype, block=block)
    assert found.block == block
    return found


Gradients = Mapping[str, Mapping[str, Tensor]]


def _gradients(backbone: Backbone, trials: Sequence[PeftTrial], **options: object) -> tuple[list[float], Gradients]:
    """Of one fused pass: losses, and what each parameter has gathered."""
    with exact(backbone.dtype):
        engine = Engine(backbone, **options)
        tasks = [attach(engine, trial) for trial in trials]
        found = engine.forward_backward({task: task.data.train for task in tasks})
    grads = {t.name: {key: view.grad.clone() for key, view in t.adapter.parameters.views.items()} for t in tasks}
    return [found[task.name].loss_sum / found[task.name].tokens for task in tasks], grads


@pytest.mark.parametrize("plain", [False, True], ids=["fast hooks", "plain hooks"])
@pytest.mark.parametrize("arch", ARCHS)
def test_all_types_in_one_pass_have_the_twins_losses_and_gradients(arch: str, plain: bool) -> None:
    trials = _one_chunk(arch)
    twin_losses, twin = _gradients(_backbone(arch, torch.float64, "transformers"), trials)
    losses, ours = _gradients(_backbone(arch, torch.float64), trials, plain=plain)
    assert losses == pytest.approx(twin_losses, rel=1e-12)
    for name, gradients in twin.items():
        assert any(bool(gradient.any()) for gradient in gradients.values())
        assert relative(ours[name], gradients) < 1e-12, name


@pytest.mark.parametrize("arch", ARCHS)
def test_every_type_alone_has_the_twins_gradient(arch: str) -> None:
    for trial in _one_chunk(arch):
        twin_losses, twin = _gradients(_backbone(arch, torch.float64, "transformers"), [trial])
        losses, ours = _gradients(_backbone(arch, torch.float64), [trial])
        assert losses == pytest.approx(twin_losses, rel=1e-12)
        assert relative(ours[trial.name], twin[trial.name]) < 1e-12, trial.name


def test_at_a_real_models_widths_together_is_alone_where_the_probe_says_so() -> None:
    """Those of SmolLM2-135M, where in MKL's usual mode rows of the joined products depend on the batch."""
    attention.register()
    config = tiny_config("llama", layers=1)
    config.update({"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3})
    config.head_dim = 64
    backbone = Backbone(AutoModelForCausalLM.from_config(config), "fast")
    trials = [PeftTrial(f"task-{seed}", Lora(), [20 + seed, 41, 30], seed=seed) for seed in range(4)]
    trials.append(PeftTrial("norms", LnTuning(), [30, 9], seed=9))
    _, together = _gradients(backbone, trials)
    for trial in trials:
        _, alone = _gradients(backbone, [trial])
        same = all(torch.equal(together[trial.name][key], value) for key, value in alone[trial.name].items())
        assert same or not Engine(backbone).row_invariant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_its_error_is_that_of_its_twin(arch: str, dtype: torch.dtype) -> None:
    """Against fp64 (bf16: fp32): at most three times transformers' own, and small."""
    trials = _one_chunk(arch)
    _, truth = _gradients(
        _backbone(arch, torch.float64 if dtype is torch.float32 else torch.float32, "transformers"), trials
    )
    _, twin = _gradients(_backbone(arch, dtype, "transformers"), trials)
    _, ours = _gradients(_backbone(arch, dtype), trials)
    least = 1e-7 if dtype is torch.float32 else 1e-3
    for name, exact_ones in truth.items():
        wide = {key: value.double() for key, value in exact_ones.items()}
        theirs, own = (relative({k: v.double() for k, v in one[name].items()}, wide) for one in (twin, ours))
        assert own <= 3 * max(theirs, least), name


def _assert_same_bits(one: Result, other: Result) -> None:
    assert one.losses == other.losses and one.losses and one.grad_norms == other.grad_norms
    assert all(torch.equal(one.values[name], other.values[name]) for name in one.values)
    assert all(torch.equal(one.moments[name], other.moments[name]) for name in one.moments)


@cache
def _together(arch: str, dtype: torch.dtype, recompute: bool = False) -> dict[str, Result]:
    return train(_backbone(arch, dtype), _members(arch), recompute=recompute)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_all_types_together_are_each_alone_bit_for_bit(arch: str, dtype: torch.dtype) -> None:
    """Norms hooked and not, whole MLPs, members of a group that see other rows: no neighbour's affair."""
    assert Engine(_backbone(arch, dtype)).row_invariant
    for trial in _members(arch):
        alone = train(_backbone(arch, dtype), [trial])[trial.name]
        _assert_same_bits(_together(arch, dtype)[trial.name], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_with_recomputation_to_the_same_bits(arch: str, dtype: torch.dtype) -> None:
    for name, kept in _together(arch, dtype).items():
        _assert_same_bits(_together(arch, dtype, recompute=True)[name], kept)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("arch", ARCHS)
def test_cut_sequences_have_the_gradient_of_whole_ones(arch: str, name: str) -> None:
    """And the same bits with recomputation, and with activations kept."""
    backbone = _backbone(arch, torch.float64)
    loss, gradient = _gradient(backbone, SPECS[name], 16)
    whole_loss, whole = _gradient(backbone, SPECS[name], 512)
    assert loss == pytest.approx(whole_loss, rel=1e-12)
    assert float((gradient - whole).norm() / whole.norm()) < 1e-11
    for options in ({"recompute": True}, {"keep_tokens": 64}):
        other_loss, other = _gradient(backbone, SPECS[name], 16, **options)
        assert other_loss == loss and torch.equal(other, gradient)


@pytest.mark.parametrize("arch", ARCHS)
def test_decoding_is_the_twins(arch: str) -> None:
    seen = []
    for block in ("transformers", "fast"):
        with exact(torch.float64):
            engine = Engine(_backbone(arch, torch.float64, block))
            for trial in mixed_trials(arch):
                attach_lora(engine, trial)
            seen.append(_decode(engine))
    for slot in JOINS:
        for theirs, ours in zip(seen[0][slot], seen[1][slot], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("arch", ARCHS)
def test_each_product_runs_once_forward_and_once_backward(arch: str) -> None:
    """For all types together, as for one; but on rows that a module changes, a joined linear runs by itself, and
    SHiRA's gradient is a dense product for a moment."""
    backbone = _backbone(arch, torch.float32)
    engine = Engine(backbone)
    trials = [trial for trial in _one_chunk(arch) if trial.name not in ("dora", "shira", "inputs", "ends")]
    tasks = [attach(engine, trial) for trial in trials]
    participants = [task.participant() for task in tasks]
    (batch,) = [action for action in engine.schedule(participants).actions if isinstance(action, MicroBatch)]
    assert {item.task for item in batch.items} == {task.name for task in tasks}
    total = sum(participant.widest for participant in participants)
    weights = {name: op.weight_OI for name, op in backbone.products.items()}
    with Products(weights, backbone.model) as seen:
        engine.forward_backward({task: task.data.train for task in tasks})
    assert dict(seen.reads) == dict.fromkeys(weights, 2)  # a prompt lies below all of them
    assert {seen.rows[name] for name in weights} == {total + -total % 16}
    shapes = {tuple(weight.shape) for weight in weights.values()}
    shapes |= {shape[::-1] for shape in shapes}
    of_head = {(SLICE_ROWS, backbone.head.in_features)}  # a slice of rows may well have the shape of a weight, turned
    assert not (seen.made - of_head) & shapes, "a gradient the size of a weight"


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_pass_takes_no_more_memory_than_the_twins(arch: str, recompute: bool) -> None:
    peaks = {}
    for block in ("transformers", "fast"):
        engine = Engine(backbone_of(arch, layers=6, block=block), recompute=recompute)
        tasks = [
            attach(engine, PeftTrial("lora", Lora(), [64] * 4)),
            attach(engine, PeftTrial("prompt", PromptTuning(), [64])),
        ]
        batches = {task: list(task.data.train) for task in tasks}
        engine.forward_backward(batches)  # whatever is made once
        peaks[block] = peak_bytes(lambda engine=engine, batches=batches: engine.forward_backward(batches))
    assert peaks["fast"] < peaks["transformers"]


@pytest.mark.parametrize("spec", [LnTuning(), Lora(), IA3(), BitFit()], ids=lambda spec: spec.type)
@pytest.mark.parametrize("arch", ARCHS)
def test_a_fresh_adapter_leaves_the_function_as_it_is_to_the_bit(arch: str, spec: PeftBase) -> None:
    engine = Engine(_backbone(arch, torch.float32))
    trial = PeftTrial("fresh", spec, [3, 20, 7])
    task = engine.attach(trial.job, Sequences(trial.examples))
    adapted = engine.forward({task: task.data.train})["fresh"].logprobs
    task.adapter.modules = {}
    assert engine.forward({task: task.data.train})["fresh"].logprobs == adapted


def test_loading_chooses_it_and_the_plain_engine_has_the_twin(tiny_llama: Path, tmp_path: Path) -> None:
    folder = resolve(str(tiny_llama), cache_dir=tmp_path)
    assert load_backbone(folder).block == "fast"
    assert load_backbone(folder, block="transformers").block == "transformers"
    assert LocalEngine(folder, cache_dir=tmp_path).backbone.block == "fast"
    assert LocalEngine(folder, block="transformers", cache_dir=tmp_path).backbone.block == "transformers"
    assert LocalEngine(folder, plain=True, cache_dir=tmp_path).backbone.block == "transformers"
    assert LocalEngine(folder, plain=True, block="fast", cache_dir=tmp_path).backbone.block == "fast"
    with pytest.raises(ConfigError, match=r"block: should be one of auto, fast, transformers.*'fats'.*'fast'"):
        LocalEngine(folder, block="fats", cache_dir=tmp_path)
