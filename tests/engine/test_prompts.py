"""Prefix and prompt tuning: what peft trains, in any company, and decoded from a cache."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from muxtune.engine.decode import DecodeSource, DecodeState
from muxtune.engine.engine import Engine
from muxtune.engine.sampling import Request, generate
from muxtune.errors import AdapterError, DataError
from muxtune.plan.types import MicroBatch, RoundSchedule, WorkItem
from muxtune.spec.peft import Place, PrefixTuning, PromptTuning
from tests.engine.build import backbone_of, exact
from tests.engine.prompts import (
    ARCHS,
    BESIDE,
    LEARNED,
    LONG_PREFIX,
    LONG_PROMPT,
    PREFIX,
    PROMPT,
    PeftTrial,
    Result,
    attach,
    matrix,
    train,
)
from tests.reference_prompts import PromptResult, peft_as_it_is, train_prompt, with_prompt
from tests.sequences import random_sequences
from tests.tiny import POSITIONS, WINDOW, tiny_model

DTYPES = (torch.float32, torch.float64)
LEARNED_NAMES = [spec.name for spec in LEARNED]


@cache
def _together(arch: str, dtype: torch.dtype) -> dict[str, Result]:
    return train(backbone_of(arch, dtype), (*LEARNED, *BESIDE))


@cache
def _reference(arch: str, name: str, dtype: torch.dtype) -> PromptResult:
    spec = _spec(name)
    start_PX = matrix(backbone_of(arch, dtype), spec, _together(arch, dtype)[name].start)
    with exact(dtype):
        return train_prompt(
            with_prompt(tiny_model(arch, dtype=dtype), spec.peft, start_PX),
            spec.batches,
            learning_rate=spec.learning_rate,
            weight_decay=spec.weight_decay,
            max_grad_norm=spec.max_grad_norm,
        )


def _seen(arch: str, name: str, like_PX: torch.Tensor) -> torch.Tensor:
    """Which numbers any query sees: all, but for the positions of a prefix that are beyond a layer's window."""
    seen_PX = torch.ones_like(like_PX)
    if name == LONG_PREFIX.name and arch in ("mistral", "gemma2"):
        columns = like_PX.shape[1] // (1 if arch == "mistral" else 2)  # of Gemma's two layers the first has a window
        seen_PX[: -(WINDOW - 1), :columns] = False
    return seen_PX


def _spec(name: str) -> PeftTrial:
    return next(spec for spec in LEARNED if spec.name == name)


@pytest.mark.parametrize("name", LEARNED_NAMES)
@pytest.mark.parametrize("arch", ARCHS)
def test_in_fp64_it_is_what_transformers_and_peft_train(arch: str, name: str) -> None:
    ours, theirs = _together(arch, torch.float64)[name], _reference(arch, name, torch.float64)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-9)
    own_PX = matrix(backbone_of(arch, torch.float64), _spec(name), ours.values)
    assert _relative(own_PX, theirs.prompt_PX) < 1e-9
    moved_PX = own_PX != matrix(backbone_of(arch, torch.float64), _spec(name), ours.start)
    assert torch.equal(moved_PX, _seen(arch, name, moved_PX))


@pytest.mark.parametrize("name", LEARNED_NAMES)
@pytest.mark.parametrize("arch", ARCHS)
def test_in_fp32_it_errs_no_more_than_three_times_what_transformers_and_peft_do(arch: str, name: str) -> None:
    ours, theirs = _together(arch, torch.float32)[name], _reference(arch, name, torch.float32)
    truth = _reference(arch, name, torch.float64)
    assert _worst(ours.losses, truth.losses) < max(3 * _worst(theirs.losses, truth.losses), 1e-6)
    own_PX = matrix(backbone_of(arch, torch.float32), _spec(name), ours.values)
    error = _relative(own_PX, truth.prompt_PX)
    assert error < max(3 * _relative(theirs.prompt_PX, truth.prompt_PX), 2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_trained_together_is_trained_alone_bit_for_bit(arch: str, dtype: torch.dtype) -> None:
    """Those that learn positions, and those beside them."""
    backbone = backbone_of(arch, dtype)
    for spec in (*LEARNED, *BESIDE):
        together, alone = _together(arch, dtype)[spec.name], train(backbone, [spec])[spec.name]
        assert together.losses == alone.losses and len(alone.losses) == spec.steps
        assert together.grad_norms == alone.grad_norms
        assert torch.equal(together.values, alone.values)
        assert all(torch.equal(together.moments[name], alone.moments[name]) for name in alone.moments)
        assert not torch.equal(alone.values, alone.start)


@pytest.mark.parametrize("arch", ["llama", "opt-350m"])
def test_the_twin_agrees(arch: str) -> None:
    plain = train(backbone_of(arch, torch.float64), (*LEARNED, *BESIDE), plain=True)
    for name, fast in _together(arch, torch.float64).items():
        assert plain[name].losses == pytest.approx(fast.losses, rel=1e-10)
        assert _relative(plain[name].values, fast.values) < 1e-9


def test_a_neighbours_nan_stays_in_its_own_rows() -> None:
    backbone = backbone_of("llama")
    expected = _together("llama", torch.float32)
    engine = Engine(backbone)
    for spec in (*LEARNED, *BESIDE):
        task = attach(engine, spec)
        if spec in (LONG_PREFIX, LONG_PROMPT):
            with torch.no_grad():
                task.adapter.parameters.values.fill_(math.nan)
    record = engine.execute(engine.schedule([task.participant() for task in engine.tasks.values()]))
    losses = {action.step.task: action.step.loss for action in record.actions if action.step is not None}
    for name, loss in losses.items():
        sick = name in (LONG_PREFIX.name, LONG_PROMPT.name)
        assert math.isnan(loss) if sick else loss == expected[name].losses[0]
    assert not any(parameter.isnan().any() for parameter in backbone.model.parameters())


@pytest.mark.parametrize("arch", ARCHS)
def test_a_step_from_the_cache_equals_computing_the_whole_sequence(arch: str) -> None:
    """Sequences of five tasks, and of none, side by side, each fed its prompt whole or in two pieces."""
    with exact(torch.float64):
        engine = Engine(backbone_of(arch, torch.float64))
        tasks = [attach(engine, spec).name for spec in (*LEARNED, *BESIDE)]
        owners = dict(enumerate([*tasks, None, PREFIX.name, PROMPT.name]))
        known = {slot: random_sequences([24], seed=slot)[0].ids.tolist() for slot in owners}
        source = DecodeSource({slot: DecodeState(ids[:9]) for slot, ids in known.items()})
        for step, fed in enumerate([4, 9, 10, 11, 24]):
            for slot, state in source.states.items():
                state.ids = known[slot][: fed if slot % 2 or step else 9]
            _decode(engine, source, owners)
            for slot, state in source.states.items():
                alone = DecodeSource({slot: DecodeState(list(state.ids))})
                _decode(engine, alone, owners)
                assert torch.allclose(state.logits_V, alone.states[slot].logits_V, rtol=1e-10, atol=1e-11), (
                    f"slot {slot} after {len(state.ids)}"
                )


def _decode(engine: Engine, source: DecodeSource, owners: dict[int, str | None]) -> None:
    """Feed every slot what it has not seen."""
    engine.sources["prompts"] = source
    items = [
        WorkItem(owner, "decode", "prompts", tuple(source.reference(slot) for slot in slots))
        for owner in dict.fromkeys(owners.values())
        if (slots := [slot for slot in source.states if owners[slot] == owner and source.waiting(slot)])
    ]
    engine.execute(RoundSchedule(0, (MicroBatch(0, 0, tuple(items)),)))


@pytest.mark.parametrize("name", LEARNED_NAMES)
@pytest.mark.parametrize("arch", ARCHS)
def test_greedy_replies_are_those_of_the_model_in_peft(arch: str, name: str) -> None:
    """Whose own `generate` loses the prefix on this transformers, which calls a cache otherwise: so, pass by pass."""
    spec, prompt = _spec(name), [7, 30, 21, 90, 5]
    with exact(torch.float64):
        engine = Engine(backbone_of(arch, torch.float64))
        for other in (*LEARNED, *BESIDE):
            attach(engine, other)
        requests = [Request(task, prompt, frozenset(), 12) for task in (name, None, BESIDE[0].name)]
        ours, *_ = generate(engine, requests)
        values = engine.task(name).adapter.parameters.values
        tuned = with_prompt(tiny_model(arch, dtype=torch.float64), spec.peft, matrix(engine.backbone, spec, values))
        ids = list(prompt)
        for _ in range(12):
            with peft_as_it_is(), torch.no_grad():
                ids.append(int(tuned(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert ours == ids[len(prompt) :]


def test_positions_are_counted_with_what_comes_before_them() -> None:
    engine = Engine(backbone_of("gpt2"))
    for peft in (PrefixTuning(num_virtual_tokens=20), PromptTuning(num_virtual_tokens=20)):
        fits = PeftTrial("fits", peft, [POSITIONS - 21])
        task = attach(engine, fits)
        assert math.isfinite(engine.forward_backward({task: task.data.train})["fits"].loss_sum)
        with pytest.raises(DataError, match=f"{POSITIONS - 19} tokens after 20 virtual ones"):
            engine.forward({task: random_sequences([POSITIONS - 20], seed=1)})
        engine.detach(task)
        with pytest.raises(DataError, match="virtual"):
            attach(engine, PeftTrial("too-long", peft, [POSITIONS - 20]))


def test_virtual_rows_fill_chunks_and_micro_batches_as_tokens_do() -> None:
    engine = Engine(backbone_of("llama"), fuse_tokens=100)
    prompt = attach(engine, PeftTrial("prompt", PromptTuning(num_virtual_tokens=20), [10] * 4, chunk_tokens=64))
    prefix = attach(engine, PeftTrial("prefix", PrefixTuning(num_virtual_tokens=20), [10] * 4, chunk_tokens=64))
    assert [len(chunk) for chunk in prompt.participant().chunks] == [2, 2]
    assert [len(chunk) for chunk in prefix.participant().chunks] == [4]
    assert (prompt.participant().widest, prefix.participant().widest) == (60, 40)
    record = engine.execute(engine.schedule([prompt.participant(), prefix.participant()]))
    assert [action.rows for action in record.actions if action.items] == [112, 64]
    outcomes = [item for action in record.actions for item in action.items]
    assert sum(item.input_tokens for item in outcomes if item.task == "prompt") == 40, "tokens of the data alone"


def test_the_seed_alone_makes_the_start_which_is_standard_normal() -> None:
    backbone = backbone_of("llama")
    for peft in (PrefixTuning(num_virtual_tokens=64), PromptTuning(num_virtual_tokens=64)):
        starts = [
            attach(Engine(backbone), PeftTrial(name, peft, [5], seed=seed)).adapter.parameters.values.clone()
            for name, seed in (("one", 1), ("two", 1), ("three", 2))
        ]
        assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])
        assert abs(float(starts[0].mean())) < 0.1 and abs(float(starts[0].std()) - 1) < 0.1
    layers = attach(Engine(backbone), PeftTrial("a", PrefixTuning(), [5])).adapter.parameters.views.values()
    assert len({view.detach().numpy().tobytes() for view in layers}) == 4, "keys and values of two layers"


@pytest.mark.parametrize("arch", ARCHS)
def test_the_specs_say_what_is_built(arch: str) -> None:
    backbone = backbone_of(arch)
    for spec in LEARNED:
        task = attach(Engine(backbone), spec)
        assert task.adapter.parameters.count == spec.peft.parameters(backbone.places)
        assert task.adapter.parameters.values.numel() * 16 == spec.peft.state_bytes(backbone.places)
        assert task.adapter.lead == spec.peft.lead == spec.peft.num_virtual_tokens
        virtual_VE = task.adapter.virtual_VE
        assert (0 if virtual_VE is None else len(virtual_VE)) == spec.peft.virtual_rows
        trained = with_prompt(tiny_model(arch), spec.peft).get_nb_trainable_parameters()[0]
        assert trained == task.adapter.parameters.count


def test_the_specs_say_what_attention_to_them_costs() -> None:
    """Counted by torch, on the family whose attention is written in plain products: twice as many positions, twice
    the work. The way back to the queries of the first layer is not needed where nothing below trains."""
    backbone = backbone_of("gemma2")
    counts = {}
    for length in (8, 16):
        engine = Engine(backbone)
        task = attach(engine, PeftTrial("counted", PrefixTuning(num_virtual_tokens=length), [16]))
        with FlopCounterMode(display=False) as counter:
            engine.forward_backward({task: task.data.train})
        counts[length] = counter.get_total_flops()
    said = 16 * PrefixTuning(num_virtual_tokens=8).flops_per_token(backbone.places)
    queries = 4 * 16
    assert counts[16] - counts[8] == said - 16 * 2 * 8 * queries


def test_a_family_whose_attention_is_not_known_is_refused_by_prefix_tuning_alone() -> None:
    backbone = backbone_of("llama")
    nameless = [Place(p.name, p.kind, frozenset(), p.layer, p.inputs, p.outputs) for p in backbone.places]
    uneven = [p._replace(outputs=48) if p.name.endswith("1.self_attn.k_proj") else p for p in backbone.places]
    for places in (nameless, uneven):
        other = _Other(backbone, places)
        with pytest.raises(AdapterError, match="whose attention is known") as caught:
            attach_to(other, PrefixTuning())
        assert "prompt_tuning" in str(caught.value.hint)
        attach_to(other, PromptTuning())


class _Other:
    """A backbone with other places."""

    def __init__(self, backbone: object, places: list[Place]) -> None:
        self._backbone = backbone
        self.places = places

    def __getattr__(self, name: str) -> object:
        return getattr(self._backbone, name)


def attach_to(view: object, spec: PrefixTuning | PromptTuning) -> None:
    from muxtune.peft.registry import build_adapter

    build_adapter(spec, view, seed=1, dtype=torch.float32, device=torch.device("cpu"))


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def _worst(ours: list[float], theirs: list[float]) -> float:
    return max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))
