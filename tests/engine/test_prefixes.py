"""What sequences begin with alike is computed once, and nothing else changes: losses, gradients, steps, counts.

Against the twin that shares nothing, in fp64 to 1e-9; and to the bit, that nobody else has a part in it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muxtune.data.types import TokenSequence
from muxtune.engine.engine import Engine
from muxtune.engine.loads import load_of_task, members_of
from muxtune.engine.rounds import run_round
from muxtune.engine.task import LEAST_SHARED
from muxtune.engine.trace_file import read_traces
from muxtune.errors import ConfigError, StateError
from muxtune.models.memory import footprint
from muxtune.plan.types import LossSpec, MicroBatch, RoundSchedule, SequenceRef, WorkItem
from muxtune.spec.peft import Lora
from tests.engine import runs
from tests.engine.build import backbone_of, exact
from tests.engine.counting import Products
from tests.engine.pairs import random_pairs
from tests.engine.prefixes import TYPES, Alike, Stepped, attach, chat, passes, step
from tests.peak import peak_bytes
from tests.tiny import tiny_folder
from tests.tiny_tokenizer import VOCAB

RESTS = (7, 3, 12, 9, 1, 5)
LORA = TYPES["lora"]
DROPS = Lora(r=4, lora_dropout=0.3)


def _assert_alike(shared: Stepped, apart: Stepped, tolerance: float = 1e-9) -> None:
    one, other = shared.outcome, apart.outcome
    assert one.loss == pytest.approx(other.loss, rel=tolerance) and one.tokens == other.tokens
    assert (one.input_tokens, one.accuracy) == (other.input_tokens, other.accuracy)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=tolerance) and one.grad_norm > 0
    assert float((shared.gradient - apart.gradient).norm()) <= tolerance * float(apart.gradient.norm())
    if one.pairs is not None and other.pairs is not None:
        assert one.pairs.chosen == pytest.approx(other.pairs.chosen, rel=tolerance)
        assert one.pairs.rejected == pytest.approx(other.pairs.rejected, rel=tolerance)


def _assert_same_bits(one: Stepped, other: Stepped) -> None:
    assert one.outcome == other.outcome
    assert torch.equal(one.gradient, other.gradient) and torch.equal(one.values, other.values)


@pytest.mark.parametrize("trained_head", [0.0, 0.6], ids=["untrained head", "trained head"])
@pytest.mark.parametrize("name", TYPES)
def test_every_type_has_the_gradient_of_sharing_nothing(name: str, trained_head: float) -> None:
    backbone = backbone_of("llama", torch.float64)
    trial = Alike("only", TYPES[name], chat(RESTS, trained_head=trained_head))
    shared, apart = step(backbone, trial), step(backbone, trial.apart)
    _assert_alike(shared, apart)
    assert not any(ref.shared for ref in apart.refs)
    assert [ref.shared for ref in shared.refs].count(0) == 1 and len(shared.refs) == len(RESTS)
    assert shared.record.computed == 40 + sum(RESTS) - len(RESTS), "the last target is never an input"
    assert shared.record.tokens == apart.record.tokens == apart.record.computed == sum(39 + rest for rest in RESTS)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("prompt", [40, 20, LEAST_SHARED - 1])
def test_a_pair_shares_its_prompt(name: str, prompt: int) -> None:
    """Both when it trains and when the bare backbone is asked; responses that begin alike, too."""
    backbone = backbone_of("llama", torch.float64)
    pairs = _pairs([prompt] * 3, [(6, 3), (2, 9), (1, 4)], alike=2)
    trial = Alike("only", TYPES[name], pairs, method="dpo")
    shared, apart = step(backbone, trial), step(backbone, trial.apart)
    _assert_alike(shared, apart)
    assert any(ref.shared for ref in shared.refs) == (prompt + 2 >= LEAST_SHARED)


def _pairs(prompts: list[int], responses: list[tuple[int, int]], *, alike: int = 0) -> tuple[TokenSequence, ...]:
    """Pairs whose responses have their first `alike` tokens in common, all of them trained."""
    made = []
    for sequence, other in zip(*(iter(random_pairs(prompts, responses, seed=5)),) * 2, strict=True):
        begin = np.full(alike, 7, np.int32)
        for one in (sequence, other):
            prompt = int(one.mask.argmax())
            ids = np.concatenate([one.ids[:prompt], begin, one.ids[prompt:]])
            made.append(TokenSequence(len(made), ids, np.arange(len(ids)) >= prompt))
    return tuple(made)


@pytest.mark.parametrize("name", ["lora", "prefix", "prompt"])
@pytest.mark.parametrize("arch", ["gpt2", "opt", "mistral", "gemma2", "gemma3", "qwen3"])
def test_windows_caps_and_learned_positions_are_as_before(arch: str, name: str) -> None:
    """Heads longer than a window; rests that see their head through it, and that do not."""
    backbone = backbone_of(arch, torch.float64)
    for head in (20, 41):
        trial = Alike("only", TYPES[name], chat((3, 25, 8), head=head, trained_head=0.5))
        shared = step(backbone, trial)
        _assert_alike(shared, step(backbone, trial.apart))
        assert any(ref.shared for ref in shared.refs)


@st.composite
def forests(draw: st.DrawFn) -> tuple[TokenSequence, ...]:
    """Sequences that grow off each other anywhere, of few tokens, masks of any kind; copies and prefixes among them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    made: list[TokenSequence] = []
    for _ in range(draw(st.integers(1, 7))):
        stem = made[draw(st.integers(0, len(made) - 1))].ids if made and draw(st.booleans()) else np.zeros(0, np.int32)
        kept = stem[: draw(st.integers(0, len(stem)))]
        own = rng.integers(3, VOCAB, size=draw(st.integers(0 if len(kept) > 1 else 2, 30)), dtype=np.int32)
        ids = np.concatenate([kept, own]).astype(np.int32)
        mask = rng.random(len(ids)) < draw(st.sampled_from([0.1, 0.5, 1.0]))
        mask[0] = False
        mask[-1] |= not mask.any()
        made.append(TokenSequence(len(made), ids, mask))
    return tuple(made)


@settings(max_examples=40)
@given(forests(), st.sampled_from(["lora", "prefix", "prompt", "ends"]), st.sampled_from([1000, 64, 40, 20]))
def test_any_forest_in_any_chunks(sequences: tuple[TokenSequence, ...], name: str, chunk_tokens: int) -> None:
    """Every trained token counts once for each sequence that has it, in the loss and in the gradient."""
    backbone = backbone_of("llama", torch.float64)
    trial = Alike("only", TYPES[name], sequences, chunk_tokens=chunk_tokens)
    shared, apart = step(backbone, trial), step(backbone, trial.apart)
    _assert_alike(shared, apart, 1e-8)
    assert shared.outcome.tokens == sum(sequence.trained_tokens for sequence in sequences)
    assert shared.record.computed <= apart.record.computed
    virtual = trial.peft.virtual_rows
    for one in passes(shared.record):
        assert sum(ref.rows(virtual) for item in one.items for ref in item.sequences) <= max(chunk_tokens, virtual + 1)


@settings(max_examples=15)
@given(st.data(), st.sampled_from([1000, 90, 40, 20]))
def test_any_pairs_in_any_chunks(data: st.DataObject, chunk_tokens: int) -> None:
    halves = data.draw(forests())
    pairs = tuple(replace(half, index=place) for place, half in enumerate(halves + halves[::-1]))
    trial = Alike("only", LORA, pairs, method="dpo", chunk_tokens=chunk_tokens)
    backbone = backbone_of("llama", torch.float64)
    shared, apart = step(backbone, trial), step(backbone, trial.apart)
    assert shared.outcome.loss == pytest.approx(apart.outcome.loss, rel=1e-8)
    size = max(float(apart.gradient.norm()), 1e-5)  # none at all where all pairs compare what is the same
    assert float((shared.gradient - apart.gradient).norm()) <= 1e-8 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nobody_else_changes_a_bit(dtype: torch.dtype) -> None:
    """Trees and none, whatever runs with whom, recomputed or not; the same for those that share nothing."""
    backbone = backbone_of("llama", dtype)
    assert Engine(backbone).row_invariant
    cast = (
        Alike("chat", LORA, chat(RESTS, trained_head=0.3)),
        Alike("prompt", TYPES["prompt"], chat((9, 4, 4), head=33, seed=2), chunk_tokens=64),
        Alike("prefix", TYPES["prefix"], chat((6, 8), head=18, seed=3)),
        Alike("plain", LORA, chat((6, 8, 20), head=3, seed=4)),
        Alike("drop", DROPS, chat((6, 8), seed=5)),
        Alike("pairs", LORA, _pairs([40, 20], [(6, 3), (2, 9)], alike=1), method="dpo"),
    )
    for trial in cast:
        others = tuple(one for one in cast if one is not trial)
        alone = step(backbone, trial)
        for beside in (step(backbone, trial, *others), step(backbone, trial, *others[::-1], fuse_tokens=200)):
            _assert_same_bits(alone, beside)
        _assert_same_bits(alone, step(backbone, trial, *others, recompute=True))
        _assert_same_bits(alone, step(backbone, trial, policy="padded"))


def test_rows_that_drop_out_are_not_shared() -> None:
    """Each has draws of its own. They do not drop out in an evaluation."""
    engine = Engine(backbone_of())
    examples = chat(RESTS)
    task = attach(engine, Alike("only", DROPS, examples), examples)
    assert not any(ref.shared for chunk in task.participant().chunks for ref in chunk)
    assert any(ref.shared for chunk in task.validation_participant().chunks for ref in chunk)
    refs = tuple(SequenceRef(place, examples[place].input_tokens, shared=40 * place) for place in (0, 1))
    item = WorkItem("only", "train", task.train_source, refs, LossSpec(1))
    with pytest.raises(StateError, match="cannot be shared"):
        engine.execute(RoundSchedule(0, (MicroBatch(0, 0, (item,)),)))


def test_what_does_not_begin_alike_is_not_shared() -> None:
    engine = Engine(backbone_of())
    examples = chat(RESTS)
    task = attach(engine, Alike("only", LORA, examples))
    refs = tuple(SequenceRef(place, examples[place].input_tokens, shared=41 * place) for place in (0, 1))
    item = WorkItem("only", "train", task.train_source, refs, LossSpec(1))
    with pytest.raises(StateError, match="does not begin as sequence 0"):
        engine.execute(RoundSchedule(0, (MicroBatch(0, 0, (item,)),)))


@pytest.mark.parametrize(("head", "shares"), [(LEAST_SHARED, True), (LEAST_SHARED - 1, False)])
def test_few_tokens_are_computed_again(head: int, shares: bool) -> None:
    task = attach(Engine(backbone_of()), Alike("only", LORA, chat((5, 5), head=head)))
    assert any(ref.shared for chunk in task.participant().chunks for ref in chunk) == shares


def test_the_plain_twin_and_a_job_that_says_so_share_nothing() -> None:
    trial = Alike("only", LORA, chat(RESTS))
    for engine, one in ((Engine(backbone_of()), trial.apart), (Engine(backbone_of(), plain=True), trial)):
        task = attach(engine, one)
        assert not any(ref.shared for chunk in task.participant().chunks for ref in chunk)


def test_evaluations_and_forward_passes_share_too() -> None:
    backbone = backbone_of("llama", torch.float64)
    held_out, found = chat(RESTS, trained_head=0.4, seed=3), []
    with exact(torch.float64):
        for trial in (Alike("only", DROPS, chat(RESTS)), Alike("only", DROPS, chat(RESTS)).apart):
            engine = Engine(backbone)
            task = attach(engine, trial, held_out)
            items = run_round(engine, [task.validation_participant()], "eval").items("only")
            told = engine.forward({task: held_out})["only"]
            found.append((sum(item.loss_sum for item in items), sum(item.correct for item in items), told))
    (loss, correct, one), (other_loss, other_correct, other) = found
    assert loss == pytest.approx(other_loss, rel=1e-10) and correct == other_correct
    assert one.logprobs == pytest.approx(other.logprobs, rel=1e-9) and len(one.logprobs or ()) == one.tokens
    assert one.tokens == sum(sequence.trained_tokens for sequence in held_out)


def test_what_the_backbone_says_of_a_pair_is_known_by_the_pair_alone() -> None:
    """Whichever pairs are asked for with it, the bits are the same, and a chosen response goes by itself."""
    pairs = _pairs([40, 20, 3], [(6, 3), (2, 9), (4, 4)], alike=1)
    backbone = backbone_of()

    def values(batch: tuple[TokenSequence, ...], fuse_tokens: int = 2048) -> list[float | None]:
        engine = Engine(backbone, fuse_tokens=fuse_tokens)
        task = attach(engine, Alike("only", LORA, batch, method="dpo"))
        engine.refer([task.participant()])
        return [engine.references.value(task.train_source, place) for place in range(len(batch))]

    together = values(pairs)
    assert together == values(pairs, 10) and None not in together
    for pair in range(3):
        assert values(pairs[2 * pair : 2 * pair + 2]) == together[2 * pair : 2 * pair + 2]
    engine = Engine(backbone)
    task = attach(engine, Alike("only", LORA, pairs, method="dpo"))
    other = attach(engine, Alike("other", LORA, pairs, method="dpo").apart)
    assert engine.refer([task.participant()]) is not None
    record = engine.refer([other.participant()])
    assert record is not None
    asked = [ref.length for one in passes(record) for item in one.items for ref in item.sequences]
    assert len(asked) == 2, "two rejected responses, by themselves this time"


def test_each_product_runs_on_the_rows_of_the_tree_and_the_head_once_on_what_is_common() -> None:
    backbone = backbone_of()
    examples = chat(RESTS, trained_head=1.0)
    weights = {name: op.weight_OI for name, op in backbone.products.items()}
    with Products(weights | {"head": backbone.head.weight_VD}, backbone.model) as seen:
        stepped = step(backbone, Alike("only", LORA, examples))
    rows = 40 + sum(RESTS) - len(RESTS)
    layers = {count for name, count in seen.rows.items() if name != "head"}  # some may run as one
    assert layers == {rows + -rows % 16} == {stepped.record.rows}
    common = 39  # of 40 tokens all but the first are targets; what follows differs and is predicted from one row
    own = sum(sequence.trained_tokens - common for sequence in examples)
    assert seen.rows["head"] == common + own + -(common + own) % 16
    assert stepped.outcome.tokens == len(RESTS) * common + own


@pytest.mark.parametrize(("arch", "rest"), [("llama", 5), ("gemma2", 20)])
def test_a_row_of_a_tree_takes_no_more_memory_than_is_estimated(arch: str, rest: int, tmp_path: Path) -> None:
    """Rests of a few tokens see many times as many keys as they have rows."""
    model = footprint(tiny_folder(tmp_path / "model", arch, layers=8), torch.float32)

    def peak(rests: int) -> int:
        engine = Engine(backbone_of(arch, layers=8))
        task = attach(engine, Alike("only", LORA, chat((rest,) * rests, head=40)))
        participant = task.participant()
        engine.execute(engine.schedule([participant]))  # whatever is made once
        return peak_bytes(lambda: engine.execute(engine.schedule([participant])))

    few, many = 120 // rest, 360 // rest
    row = (peak(many) - peak(few)) / ((many - few) * (rest - 1))
    assert 0.3 * model.row_bytes < row < model.row_bytes + (39 + rest) * model.score_bytes


@pytest.mark.parametrize("method", ["sft", "dpo"])
@pytest.mark.parametrize("chunk_tokens", [1000, 64])
def test_a_load_is_what_the_engine_runs(method: str, chunk_tokens: int) -> None:
    """Pass by pass: rows, tokens, and what has been predicted for exactly that."""
    backbone = backbone_of()
    data = chat(RESTS, trained_head=0.5) if method == "sft" else _pairs([40, 20], [(6, 3), (2, 9)])
    for trial in (
        Alike("one", LORA, data, method=method, chunk_tokens=chunk_tokens, share=one) for one in (True, False)
    ):
        engine = Engine(backbone)
        task = attach(engine, trial)
        load, participant = load_of_task(task, backbone.places), task.participant()
        engine.refer([participant])
        record = engine.execute(engine.schedule([participant]))
        expected = [(chunk.rows + -chunk.rows % 16, chunk.rows + chunk.shared) for chunk in load.chunks]
        ran = [(done.rows, one.tokens) for done, one in zip(record.actions, passes(record), strict=False)]
        assert ran == expected and (record.computed < record.tokens) == trial.share
        found = [members_of(one, engine.tasks, {"one": load}, engine.sources) for one in passes(record)]
        assert found == [[(load, chunk)] for chunk in load.chunks]


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tiny_llama: Path, data: Path, disk: Path, cache: Path) -> None:
    """With the trees of an undisturbed one; what shares cannot be changed on the way."""
    lines = [
        {"prompt": "You are a helpful assistant. " * 2 + f"{n} + {n} = ", "completion": f"{2 * n}"} for n in range(9)
    ]
    (data / "alike.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    jobs = [runs.job(data, "alike", "text", datasets=["alike.jsonl"]), runs.job(data, "sql")]
    whole, parts = (runs.run_of(tiny_llama, disk / name, jobs) for name in ("whole", "parts"))
    runs.train(whole, cache_dir=cache)
    runs.train(parts, cache_dir=cache, stop=runs.stop_after(4))
    runs.train(parts, cache_dir=cache, resume=True)
    for job in jobs:
        runs.assert_same_result(disk / "whole" / job.name, disk / "parts" / job.name)
    refs = [
        ref for record in read_traces(disk / "whole") for one in passes(record) for item in one.items
        for ref in item.sequences
    ]  # fmt: skip
    assert any(ref.shared for ref in refs)
    other = jobs[0].model_copy(update={"share_prefixes": False})
    with pytest.raises(ConfigError, match="share_prefixes: True -> False"):
        runs.train(runs.run_of(tiny_llama, disk / "whole", [other]), cache_dir=cache, resume=True)
