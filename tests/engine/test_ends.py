"""LoRA on the embedding and the head: as transformers + peft train it, in any company as alone, fast as plain."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from muxtune.engine.decode import DecodeSource, DecodeState
from muxtune.engine.engine import Engine
from muxtune.errors import AdapterError
from muxtune.plan.types import MicroBatch, RoundSchedule, WorkItem
from muxtune.spec.peft import read_peft
from tests.engine.build import backbone_of, exact
from tests.engine.ends import ARCHS, NAMES, beside, embedding_of, on_ends
from tests.engine.linears import Result, assert_same_bits, attach, first_gradients, reference, train
from tests.engine.prompts import PeftTrial
from tests.reference_linears import LinearResult, relative_difference

# peft says of a Conv1D model's head that it is an nn.Linear, and takes it as one
pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True", "ignore:Model has `tie_word_embeddings")
MIXED = ("llama-tied", "gpt2", "gemma2", "opt-350m")


def trial_of(arch: str, name: str) -> PeftTrial:
    return next(trial for trial in on_ends(arch) if trial.name == name)


@cache
def _together(arch: str, dtype: torch.dtype, plain: bool = False) -> dict[str, Result]:
    return train(backbone_of(arch, dtype), (*on_ends(arch), *beside(arch)), plain=plain)


@cache
def _reference(arch: str, name: str) -> LinearResult:
    return reference(arch, trial_of(arch, name), torch.float64)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ARCHS)
def test_in_fp64_it_is_what_transformers_and_peft_train(arch: str, name: str) -> None:
    ours, theirs = _together(arch, torch.float64)[name], _reference(arch, name)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-9)
    assert relative_difference(ours.values, theirs.values) < 1e-9


@pytest.mark.parametrize("arch", ARCHS)
def test_first_gradients_are_those_of_peft_and_of_the_twin(arch: str) -> None:
    backbone = backbone_of(arch, torch.float64)
    fast, plain = (first_gradients(backbone, on_ends(arch), plain=twin) for twin in (False, True))
    for name in NAMES:
        assert relative_difference(fast[name], _reference(arch, name).gradients) < 1e-11
        assert relative_difference(fast[name], plain[name]) < 1e-12
        assert all(bool(gradient.any()) for gradient in fast[name].values()), "something does not learn"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("arch", MIXED)
def test_trained_together_is_trained_alone_bit_for_bit(arch: str, dtype: torch.dtype) -> None:
    """Those on the ends, and those beside them whose rows now carry a gradient further down."""
    backbone = backbone_of(arch, dtype)
    for trial in (*on_ends(arch), *beside(arch)):
        assert_same_bits(_together(arch, dtype)[trial.name], train(backbone, [trial])[trial.name])


@pytest.mark.parametrize("arch", MIXED)
def test_the_plain_twin_trains_the_same(arch: str) -> None:
    for name in NAMES:
        fast, plain = _together(arch, torch.float64)[name], _together(arch, torch.float64, plain=True)[name]
        assert fast.losses == pytest.approx(plain.losses, rel=1e-12)
        assert relative_difference(fast.values, plain.values) < 1e-10


@pytest.mark.parametrize("name", ["both", "long"])
def test_how_a_batch_is_split_changes_rounding_only(name: str) -> None:
    backbone = backbone_of("llama-tied", torch.float64)
    whole = _together("llama-tied", torch.float64)[name]
    for chunk_tokens in (16, 64):
        split = train(backbone, [replace(trial_of("llama-tied", name), chunk_tokens=chunk_tokens)])[name]
        assert split.losses == pytest.approx(whole.losses, rel=1e-12)
        assert relative_difference(split.values, whole.values) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_a_fresh_adapter_is_the_backbone_itself_and_moves_in_the_first_step(arch: str, dtype: torch.dtype) -> None:
    engine = Engine(backbone_of(arch, dtype))
    trial = replace(trial_of(arch, "both"), weight_decay=0)
    task = engine.attach(trial.job, attach(Engine(engine.backbone), trial).data)
    start = task.adapter.state()
    fresh = engine.forward({task: trial.examples})[task.name]
    modules, task.adapter.modules = task.adapter.modules, {}
    bare = engine.forward({task: trial.examples})[task.name]
    task.adapter.modules = modules
    assert fresh.logprobs == bare.logprobs
    engine.forward_backward({task: trial.batches[0]})
    engine.optim_step(task)
    still = {key for key, value in task.adapter.state().items() if torch.equal(value, start[key])}
    # A half whose other half is zero has no gradient yet.
    assert still == {key for key in start if key.endswith(("lora_A", "lora_embedding_B"))}
    assert engine.forward({task: trial.examples})[task.name].logprobs != bare.logprobs


def test_only_the_tasks_own_tokens_move_its_embedding_and_never_the_padding_entry() -> None:
    for arch, padded in (("llama", True), ("gpt2", False)):
        gradients = first_gradients(backbone_of(arch, torch.float64), on_ends(arch))
        for name in ("both", "embedding", "long"):
            batch = trial_of(arch, name).batches[0]
            (a_RV,) = (value for key, value in gradients[name].items() if key.endswith("lora_embedding_A"))
            moved = set(a_RV.any(dim=0).nonzero().flatten().tolist())
            before_the_last = {int(token) for sequence in batch for token in sequence.ids[:-1]}
            assert 0 in before_the_last
            assert moved <= before_the_last - ({0} if padded else set()) and (0 in moved) is not padded
            assert len(moved) > 0.8 * len(before_the_last)


def test_a_head_that_is_not_finite_spoils_its_own_task_alone() -> None:
    backbone = backbone_of("gemma2")
    trials = (*on_ends("gemma2"), *beside("gemma2"))
    engines = [Engine(backbone), Engine(backbone)]
    for engine in engines:
        for trial in trials:
            attach(engine, trial)
    views = engines[1].task("both").adapter.parameters.views
    with torch.no_grad():
        views["lm_head.lora_B"].fill_(float("nan"))
    (sound, _), (spoilt, outcomes) = (
        ({name: task.adapter.parameters.gradient for name, task in engine.tasks.items()}, _first_pass(engine, trials))
        for engine in engines
    )
    assert not np.isfinite(outcomes["both"].loss_sum)
    for name in sound.keys() - {"both"}:
        assert torch.equal(sound[name], spoilt[name]) and bool(sound[name].any())


def _first_pass(engine: Engine, trials: tuple[PeftTrial, ...]):  # type: ignore[no-untyped-def]
    return engine.forward_backward({trial.name: trial.batches[0] for trial in trials})


@pytest.mark.parametrize("arch", ARCHS)
def test_decoding_goes_through_both_ends(arch: str) -> None:
    """A prompt and one token more from the cache, several tasks at once, against whole forward passes."""
    ids = np.random.default_rng(3).integers(3, 320, 9).tolist()
    engine, twin = (Engine(backbone_of(arch, torch.float64), plain=plain) for plain in (False, True))
    for trial in (*on_ends(arch), *beside(arch)):
        attach(engine, trial)
        attach(twin, trial)
    with exact(torch.float64):
        together = _decoded(engine, [*engine.tasks, None], ids)
        for name, logits_V in together.items():
            (alone_V,) = _decoded(engine, [name], ids).values()
            assert torch.equal(logits_V, alone_V)
            torch.testing.assert_close(logits_V, _decoded(twin, [name], ids, steps=0)[name], rtol=1e-10, atol=1e-11)
    assert not torch.allclose(together["head"], together[None], atol=1e-2)
    assert not torch.allclose(together["embedding"], together[None], atol=1e-2)


def _decoded(engine: Engine, names: list[str | None], ids: list[int], steps: int = 1) -> dict[str | None, Tensor]:
    source = DecodeSource({slot: DecodeState(ids[: len(ids) - steps]) for slot in range(len(names))})
    engine.sources["prompts"] = source
    for step in range(steps + 1):
        items = [WorkItem(name, "decode", "prompts", (source.reference(slot),)) for slot, name in enumerate(names)]
        engine.execute(RoundSchedule(step, (MicroBatch(0, 0, tuple(items)),)))
        for state in source.states.values():
            state.ids = ids[: len(ids) - steps + step + 1]
    found = {name: source.states[slot].logits_V for slot, name in enumerate(names)}
    return {name: logits_V for name, logits_V in found.items() if logits_V is not None}


@pytest.mark.parametrize("name", ["dora", "pissa", "bitfit", "ia3", "shira"])
def test_other_types_are_refused_there_when_they_are_attached(name: str) -> None:
    engine = Engine(backbone_of("gpt2"))
    for target, what in ((embedding_of("gpt2"), "token embedding"), ("lm_head", "head")):
        peft = read_peft({"type": name, "target_modules": ["c_attn", target]})
        trial = PeftTrial(name, peft, [3, 4])
        with pytest.raises(AdapterError, match=f"'{target}' is the base model's {what}, which {name} does not train"):
            engine.attach(trial.job, attach(Engine(engine.backbone), trial_of("gpt2", "head")).data)
    assert not engine.tasks


def test_all_linear_is_neither() -> None:
    engine = Engine(backbone_of("llama"))
    task = attach(engine, PeftTrial("lora", read_peft("lora"), [3, 4]))
    assert set(task.adapter.modules) == set(engine.backbone.attach_points)
    place = {place.kind: place for place in engine.backbone.places}
    assert place["head"].name == "lm_head" and place["embedding"].name == "model.embed_tokens"
