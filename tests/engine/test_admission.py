"""Who fits into memory: refused or put off with the numbers, and rows fused as far as the rest allows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from muxtune.data.prepare import PreparedJob, Preparer
from muxtune.engine.admission import Admission, JobSize, admit
from muxtune.engine.engine import DEFAULT_CHUNK_TOKENS, DEFAULT_FUSE_TOKENS
from muxtune.engine.room import Room, starting
from muxtune.engine.shortage import size_text, waits
from muxtune.errors import AdapterError
from muxtune.models.memory import Footprint
from muxtune.spec.peft import Place
from muxtune.spec.scalars import read_size
from tests.engine.runs import job, write_data

ROW, HEAD, WEIGHTS, PROCESS = 1000, 50_000, 2_000_000, 3_000_000
Q_PROJ = Place("model.layers.0.self_attn.q_proj", "linear", frozenset({"q"}), 0, 100, 100)
MODEL = Footprint(WEIGHTS, ROW, 0, HEAD, 0, 0, (Q_PROJ,))
ADAPTER = {"peft": {"r": 1, "target_modules": ["q_proj"]}}
STATE = 16 * (100 + 100)


@pytest.fixture(scope="module")
def prepared(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreparedJob]:
    data = write_data(tmp_path_factory.mktemp("data"))
    preparer = Preparer(tiny_llama)
    names = {"sql": "sql", "chat": "chat", "one": "sql"}
    return {
        name: preparer.prepare(job(data, name, like, **ADAPTER), created=datetime.now(UTC))
        for name, like in names.items()
    }


def admitted(jobs: Sequence[PreparedJob], free: int, model: Footprint = MODEL) -> Admission:
    """With `free` bytes beside the process, the weights and the adapters."""
    limit = PROCESS + WEIGHTS + STATE * len(jobs) + free
    return admit(jobs, model, dtype=torch.float32, limit_bytes=limit, process_bytes=PROCESS)


def widest(one: PreparedJob) -> int:
    """Rows of the largest batch, when all of it is as long as the longest."""
    return max(sequence.input_tokens for sequence in one.data.train) * one.job.effective_batch


def test_with_memory_to_spare(prepared: dict[str, PreparedJob]) -> None:
    jobs = list(prepared.values())
    found = admitted(jobs, 10**9)
    assert not found.refused and found.fuse_tokens == DEFAULT_FUSE_TOKENS
    assert [size.job.name for size in found.sizes] == list(prepared)
    assert all(size.state_bytes == STATE and size.parameters == 200 for size in found.sizes)
    rows = sum(map(widest, jobs))
    assert found.peak_bytes == PROCESS + WEIGHTS + STATE * 3 + HEAD + ROW * rows


def test_little_memory_fuses_less(prepared: dict[str, PreparedJob]) -> None:
    jobs = [prepared["sql"], prepared["one"]]
    rows = widest(jobs[0]) + 10
    found = admitted(jobs, HEAD + ROW * rows)
    assert not found.refused and found.fuse_tokens == rows
    assert found.peak_bytes == found.limit_bytes


def test_a_job_that_fits_by_a_byte_and_not_without_it(prepared: dict[str, PreparedJob]) -> None:
    sql, chat = prepared["sql"], prepared["chat"]
    assert widest(sql) < widest(chat)
    need = HEAD + ROW * widest(chat)
    assert not admitted([sql, chat], need - STATE).refused
    found = admitted([sql, chat], need - STATE - 1)
    ((refused, error),) = found.refused
    assert refused.name == "chat" and error.where == "jobs.chat"
    assert f"its longest batch ({widest(chat)} tokens at once) needs about {size_text(need)}" in error.message
    assert f"base model ({size_text(WEIGHTS)}) and 1 adapter ({size_text(STATE)})" in error.message
    assert [size.job.name for size in found.sizes] == ["sql"] and not found.waiting


@pytest.mark.parametrize("names", [["sql", "chat"], ["chat", "sql"], ["one", "sql", "chat"]])
def test_what_fits_alone_and_not_beside_the_others_waits(names: list[str], prepared: dict[str, PreparedJob]) -> None:
    """By a byte; first come, first served; and nothing is recomputed for it."""
    jobs = [prepared[name] for name in names]
    need = HEAD + ROW * widest(prepared["chat"])
    assert [size.job.name for size in admitted(jobs, need, LEAN).sizes] == names
    found = admitted(jobs, need - 1, LEAN)
    assert not found.refused and not found.model.recompute
    assert [size.job.name for size in (*found.sizes, *found.waiting)] == names
    (waiting,) = found.waiting
    assert waiting.job.name == names[-1] and all(size.rounds > 0 for size in (*found.sizes, waiting))
    assert found.peak_bytes <= found.limit_bytes
    assert found.peak_bytes == found.room.peak_bytes(found.sizes)
    told = waits(waiting, found.sizes, [], found.room)
    first = STATE * len(found.sizes)
    assert told.startswith(f"waits for memory: its adapter ({size_text(STATE)}) and a batch as wide")
    assert f"({size_text(need)}) need about {size_text(need + STATE)}; " in told
    assert f"there are {size_text(need - 1 + STATE)} left beside" in told and f"({size_text(first)})" in told


def test_what_fits_but_would_keep_another_from_its_turn_is_told_so(prepared: dict[str, PreparedJob]) -> None:
    (one,) = admitted([prepared["sql"]], 10**9).sizes
    room = Room(MODEL, PROCESS + WEIGHTS + 10**6, PROCESS)

    def sized(name: str, held: int, rounds: int) -> JobSize:
        return replace(one, job=_named(prepared["sql"], 0).job.model_copy(update={"name": name}), state_bytes=held,
                       activation_bytes=0, rounds=rounds)  # fmt: skip

    first, large, long = sized("first", 6 * 10**5, 9), sized("large", 9 * 10**5, 9), sized("long", 10**5 + 1, 10)
    assert starting([], [first, large, long], room.fits) == [first]
    assert waits(long, [first], [large], room) == (
        "waits for its turn: it would keep large, which comes before it, from its own"
    )
    assert waits(large, [first], [], room).startswith("waits for memory: ")


def test_steps_that_are_done_count_as_such(prepared: dict[str, PreparedJob]) -> None:
    (one,) = admitted([prepared["chat"]], 10**9).sizes
    assert one.rounds == 13
    found = admit(
        [prepared["chat"]], MODEL, dtype=torch.float32, limit_bytes=10**9, process_bytes=0, done={"chat": 4, "sql": 9}
    )
    assert found.sizes == (replace(one, rounds=9),)


LEAN = replace(MODEL, blocks=10, input_bytes=300)  # with recomputation 1.33 * 300 + 3 / 10 * ROW a row
LEAN_ROW = 399 + 300


def test_what_does_not_fit_otherwise_is_recomputed(prepared: dict[str, PreparedJob]) -> None:
    sql, chat = prepared["sql"], prepared["chat"]
    need = HEAD + ROW * widest(chat) - STATE
    assert not admitted([sql, chat], need, LEAN).model.recompute, "never where it need not be"
    found = admitted([sql, chat], need - 1, LEAN)
    assert found.model.recompute and not found.refused
    assert [size.job.name for size in found.sizes] == ["sql", "chat"]
    assert found.fuse_tokens == (need - 1 - HEAD) // LEAN_ROW > widest(chat)
    rows = widest(sql) + widest(chat)
    assert found.peak_bytes == PROCESS + WEIGHTS + 2 * STATE + HEAD + LEAN_ROW * min(rows, found.fuse_tokens)
    least = HEAD + LEAN_ROW * widest(chat)
    assert admitted([sql, chat], least, LEAN).model.recompute


def test_what_does_not_fit_even_so_is_told_the_least_and_slows_nobody_down(prepared: dict[str, PreparedJob]) -> None:
    sql, chat = prepared["sql"], prepared["chat"]
    least = HEAD + LEAN_ROW * widest(chat)
    assert HEAD + ROW * widest(sql) < least - 1
    found = admitted([sql, chat], least - STATE - 1, LEAN)
    ((refused, error),) = found.refused
    assert refused.name == "chat" and f"needs about {size_text(least)} with recomputation" in error.message
    assert [size.job.name for size in found.sizes] == ["sql"] and not found.model.recompute


def test_the_longest_sequence_after_truncation_is_what_counts(tiny_llama: Path, tmp_path: Path) -> None:
    """reports.md 12: one long example, and the same job cut to fit."""
    data = write_data(tmp_path)
    (data / "sql.jsonl").write_text(
        '{"prompt": "a", "completion": "b"}\n{"prompt": "%s", "completion": "b"}\n' % ("a " * 60)
    )
    preparer = Preparer(tiny_llama)
    changes = ADAPTER | {"per_device_train_batch_size": 1}
    whole, cut = (
        preparer.prepare(job(data, "sql", **changes, max_length=limit, train_on="all"), created=datetime.now(UTC))
        for limit in (200, 30)
    )
    need = HEAD + ROW * 40
    ((_, error),) = admitted([whole], need).refused
    (size,) = admitted([cut], need).sizes
    assert size.longest == size.widest == 29 and "tokens at once" in error.message


def test_an_over_large_adapter_costs_nobody_else_a_place(prepared: dict[str, PreparedJob]) -> None:
    sql = prepared["sql"]
    peft = sql.job.peft.model_copy(update={"r": 60_000})
    large = replace(sql, job=sql.job.model_copy(update={"name": "large", "peft": peft}))
    for jobs in ([large, sql], [sql, large]):
        found = admitted(jobs, HEAD + ROW * widest(sql) + STATE)
        assert [size.job.name for size in found.sizes] == ["sql"]
        ((refused, error),) = found.refused
        assert refused.name == "large" and f"1 adapter ({size_text(STATE * 60_000)})" in error.message


def test_a_stated_limit_lowers_the_chunk_budget_of_a_job(prepared: dict[str, PreparedJob]) -> None:
    """Down to 64 tokens, by what the job alone would have: neither free memory nor others change it."""
    text, sql = prepared["sql"], prepared["one"]
    longest = max(sequence.input_tokens for sequence in text.data.train)
    assert longest < 64 and widest(text) > 64

    def sized(limit: int, jobs: Sequence[PreparedJob], process: int = PROCESS, free: int = 10**9) -> list[JobSize]:
        found = admit(
            jobs,
            MODEL,
            dtype=torch.float32,
            limit_bytes=min(limit, process + free),
            process_bytes=process,
            memory_limit=limit,
        )
        return list(found.sizes)

    def limit_of(rows: int) -> int:
        return 2**28 + WEIGHTS + STATE + HEAD + ROW * rows

    (roomy,) = sized(limit_of(widest(text)), [text])
    assert (roomy.chunk_tokens, roomy.widest, roomy.warning) == (DEFAULT_CHUNK_TOKENS, widest(text), None)
    (lowered,) = sized(limit_of(64), [text])
    assert (lowered.chunk_tokens, lowered.widest) == (64, 64) and "chunks of 64 tokens" in str(lowered.warning)
    assert sized(limit_of(64), [text], process=2**28)[0] == lowered == sized(limit_of(64), [text, sql])[0]
    assert not sized(limit_of(63), [text], process=2**28)
    assert not sized(limit_of(widest(text)), [text], free=WEIGHTS + STATE + HEAD), "what is free lowers nothing"


def test_a_sequence_longer_than_a_chunk_counts_by_its_keys_and_values(tiny_llama: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path)
    (data / "sql.jsonl").write_text('{"prompt": "%s", "completion": "b"}\n' % ("a " * 100))
    changes = ADAPTER | {"per_device_train_batch_size": 1, "max_length": 250}
    (one,) = [Preparer(tiny_llama).prepare(job(data, "sql", **changes), created=datetime.now(UTC))]
    longest = max(sequence.input_tokens for sequence in one.data.train)
    assert longest > 100
    model = replace(MODEL, position_bytes=100)

    def sized(rows: int, positions: int) -> list[JobSize]:
        room = HEAD + ROW * rows + 100 * positions
        limit = 2**28 + WEIGHTS + STATE + room
        found = admit(
            [one],
            model,
            dtype=torch.float32,
            limit_bytes=limit,
            process_bytes=2**28,
            memory_limit=limit,
        )
        return list(found.sizes)

    (whole,) = sized(longest, 0)
    assert (whole.widest, whole.carried_bytes) == (longest, 0)
    (cut,) = sized(64, longest)
    assert (cut.widest, cut.chunk_tokens, cut.carried_bytes) == (64, 64, 100 * longest)
    assert not sized(64, longest - 1)


def test_what_is_still_free_keeps_activations_of_cut_sequences(
    prepared: dict[str, PreparedJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the longest of each job, as far as there is room; of none where even a chunk's are not kept, nor of dpo."""
    monkeypatch.setattr("muxtune.engine.admission.DEFAULT_CHUNK_TOKENS", 16)
    jobs = [prepared["sql"], prepared["chat"]]
    longest = sum(max(sequence.input_tokens for sequence in one.data.train) for one in jobs)
    carried = 10 * longest
    model = replace(LEAN, position_bytes=10)

    def kept(jobs: Sequence[PreparedJob], rows: int) -> Admission:
        return admitted(jobs, carried + HEAD + ROW * rows, model)

    for more in (0, 1, 17, longest):
        found = kept(jobs, 32 + more)
        assert found.fuse_tokens == 32 + more and found.keep_tokens == more
        assert found.peak_bytes == found.limit_bytes and [size.widest for size in found.sizes] == [16, 16]
    assert kept(jobs, 10**6).keep_tokens == longest
    lean = kept(jobs[:1], 15)
    assert lean.model.recompute and lean.keep_tokens == 0 and len(lean.sizes) == 1
    pairs = replace(jobs[1], job=jobs[1].job.model_copy(update={"method": "dpo"}))
    assert kept([jobs[0], pairs], 10**6).keep_tokens == max(sequence.input_tokens for sequence in jobs[0].data.train)
    assert admitted(jobs, 10**9).keep_tokens == 0, "nothing is cut"


def _named(one: PreparedJob, number: int, **peft: int) -> PreparedJob:
    changed = one.job.model_copy(update={"name": f"j{number}", "peft": one.job.peft.model_copy(update=peft)})
    return replace(one, job=changed)


@pytest.mark.parametrize("process", [PROCESS, 2**28 - 10**7, 2**29 + 10**7])
@pytest.mark.parametrize("wide", [{}, {"r": 9000}])
@pytest.mark.parametrize("model", [MODEL, replace(MODEL, blocks=10, input_bytes=300)])
def test_many_jobs_are_refused_in_one_sentence_with_the_least_that_works(
    model: Footprint, wide: dict[str, int], process: int, prepared: dict[str, PreparedJob]
) -> None:
    """At that limit each of them fits, with a process a little larger than now, and not at a tenth (and a MB) less."""
    jobs = [
        _named(prepared[name], 10 * place + number, **wide)
        for place, name in enumerate(prepared)
        for number in range(10)
    ]

    def limited(limit: int, process: int = process) -> Admission:
        return admit(jobs, model, dtype=torch.float32, limit_bytes=limit, process_bytes=process, memory_limit=limit)

    found = limited(10**6)
    assert len(found.refused) == 30
    ((_, error),) = found.refusals
    assert error.where == "jobs" and "30 of 30 jobs do not fit into memory, not even alone (j" in error.message
    assert error.message.count("do not fit") == 1 and len(str(error)) < 500
    told = re.fullmatch(
        r"give it more memory: memory_limit: (\S+) is the least that works for all 30 jobs", str(error.hint)
    )
    assert told is not None, "shorter sequences and fewer jobs would not help"
    least = read_size(told[1])
    assert abs(least - found.least_bytes) <= 1
    assert not limited(least).refused and not limited(least, process + process // 60).refused
    assert limited(least - least // 10 - 10**6).refused


def test_a_refusal_advises_what_can_help(prepared: dict[str, PreparedJob]) -> None:
    jobs = list(prepared.values())
    ((_, error),) = admitted(jobs, HEAD + ROW * widest(prepared["chat"]) - 2 * STATE - 1).refusals
    assert re.fullmatch(
        r"lower max_length, or give it .*: memory_limit: [0-9]+MB is the least that works for all 3 jobs",
        str(error.hint),
    )
    ((_, error),) = admitted(jobs[:1], HEAD).refusals
    assert re.fullmatch(
        r"lower max_length, or give it .*: memory_limit: [0-9]+MB is the least that works", str(error.hint)
    )
    none = _named(prepared["sql"], 1)
    unknown = replace(
        none, job=none.job.model_copy(update={"peft": none.job.peft.model_copy(update={"target_modules": ("nope",)})})
    )
    refusals = admitted([*jobs, unknown], -(10**6)).refusals
    assert (
        len(refusals) == 2
        and "is nothing in the base model" in refusals[0][1].message
        and "3 of 3 jobs" in refusals[1][1].message
    )


def test_not_even_the_adapters_fit(prepared: dict[str, PreparedJob]) -> None:
    found = admitted([prepared["sql"]], -1)
    assert [refused.name for refused, _ in found.refused] == ["sql"] and not found.sizes


def test_targets_that_match_nothing_are_refused_before_a_weight_is_loaded(prepared: dict[str, PreparedJob]) -> None:
    other = Footprint(WEIGHTS, ROW, 0, HEAD, 0, 0, (Q_PROJ._replace(name="model.layers.0.mlp.fc1"),))
    found = admit([prepared["sql"]], other, dtype=torch.float32, limit_bytes=10**9, process_bytes=0)
    ((_, error),) = found.refused
    assert isinstance(error, AdapterError) and "'q_proj'" in error.message


def test_fp64_adapters_are_twice_as_large(prepared: dict[str, PreparedJob]) -> None:
    found = admit([prepared["sql"]], MODEL, dtype=torch.float64, limit_bytes=10**9, process_bytes=0)
    assert found.sizes[0].state_bytes == 2 * STATE


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1500, "2 kB"), (1_540_000, "1.5 MB"), (2.2e12, "2.2 TB")]
)
def test_sizes_are_readable(size: int, text: str) -> None:
    assert size_text(size) == text
