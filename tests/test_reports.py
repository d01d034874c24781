"""What users of other tools reported, one check each: which test holds it here.

Each entry is one case of a kind of fault that must be impossible. The table is itself checked: a test that is renamed
or lost takes its report with it. Checks that had no better home follow below. The numbers are those of the project's
list of public reports; 2 to 4, 16 (two clients at one server), 17, 21 (a worker killed under a server), 22 and 24 are
about a service or a client protocol and come with it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from muxtune.engine.engine import Engine
from muxtune.engine.local import LocalEngine
from muxtune.engine.task import Sequences, Task
from muxtune.models.backbone import Backbone
from muxtune.spec.job import JobSpec
from tests.engine.build import backbone_of, exact, run
from tests.engine.cast import ARCHS, cast
from tests.engine.prompts import PeftTrial
from tests.engine.selective import attach
from tests.sequences import random_sequences
from tests.tiny import tiny_folder
from tests.tiny_tokenizer import END_OF_TURN_ID

ROOT = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Report:
    seen: str
    tests: tuple[str, ...]  # FILE::FUNCTION, FILE relative to tests/


REPORTS: Mapping[int, Report] = {
    1: Report(
        "a JSON array in .jsonl, or a field of another type in one row, dies without line or cause",
        (
            "data/test_reader.py::test_an_array_in_jsonl_is_refused_by_line",
            "data/test_shapes.py::test_a_field_that_is_no_string_is_named",
            "cli/test_train.py::test_one_bad_file",
        ),
    ),
    5: Report(
        "of several turns all answers but the last are masked",
        ("data/test_render.py::test_every_answer_is_trained_with_its_end_of_turn_and_nothing_else",),
    ),
    6: Report(
        "a template without generation markers masks everything",
        (
            "data/test_render.py::test_a_template_without_generation_blocks_is_masked_all_the_same",
            "data/test_render.py::test_a_template_that_rewrites_earlier_turns_is_refused_by_name",
        ),
    ),
    7: Report(
        "BOS twice after a template, or EOS lost with the cure",
        (
            "data/test_render_tokens.py::test_bos_is_there_once_whoever_adds_it",
            "data/test_render_tokens.py::test_a_tokenizer_that_adds_eos_adds_it_once",
        ),
    ),
    8: Report(
        "padding is EOS, the collator masks it, and the model never learns to stop",
        (
            "data/test_render_tokens.py::test_eos_is_trained_though_it_is_the_padding_too",
            "test_reports.py::test_a_model_whose_padding_is_its_end_of_turn_learns_to_stop",
        ),
    ),
    9: Report(
        "the adapter stops at another token than the template's end of turn",
        (
            "peft/test_folder.py::test_the_folder_carries_all_that_it_needs",
            "peft/test_folder.py::test_stop_tokens_join_the_models_own",
            "cli/test_sample.py::test_what_was_learnt_and_where_it_ends",
        ),
    ),
    10: Report(
        "packed sequences see each other",
        (
            "engine/test_accumulation.py::test_packed_losses_are_those_of_the_sequences_apart",
            "engine/test_packing.py::test_rows_positions_targets_and_weights_are_those_of_the_sequences",
            "models/test_probe.py::test_a_layer_that_mixes_the_sequences_of_a_pack_is_refused",
        ),
    ),
    11: Report(
        "a task's loss depends on the padding that longer sequences of another cause",
        (
            "engine/test_isolation.py::test_another_tasks_tokens_never_change_a_bit_of_a_gradient",
            "test_reports.py::test_a_co_runner_four_times_as_long_changes_no_loss",
        ),
    ),
    12: Report(
        "out of memory only when the longest example comes up",
        (
            "engine/test_admission.py::test_a_job_that_fits_by_a_byte_and_not_without_it",
            "engine/test_admission.py::test_the_longest_sequence_after_truncation_is_what_counts",
            "cli/test_train.py::test_what_cannot_run_is_refused_first",
        ),
    ),
    13: Report(
        "of several adapters on one base only the first ever changes",
        (
            "engine/test_fidelity.py::test_trained_together_is_trained_alone_bit_for_bit",
            "engine/test_mixes.py::test_whoever_comes_and_goes_each_task_ends_as_alone",
            "engine/test_all_types.py::test_what_a_type_trains_moves_in_the_first_step",
        ),
    ),
    14: Report(
        "parameters of adapters that take no part stay trainable, or the base's move",
        (
            "engine/test_one_pass.py::test_a_hundred_steps_of_five_tasks_leave_the_backbone_as_it_was",
            "engine/test_one_pass.py::test_what_trains_in_a_step_is_the_parameters_of_the_tasks_that_take_part",
            "test_reports.py::test_of_any_types_those_that_take_part_are_trained_and_nothing_else",
        ),
    ),
    15: Report(
        "fewer key than query heads crash, or go wrong",
        (
            "engine/test_fidelity.py::test_in_fp64_it_is_what_transformers_and_peft_train",
            "engine/test_isolation.py::test_another_tasks_tokens_never_change_a_bit_of_a_gradient",
        ),
    ),
    18: Report(
        "accumulation over lengths that differ averages averages",
        (
            "engine/test_accumulation.py::test_every_split_gives_the_same_gradient_and_the_same_loss",
            "engine/test_accumulation.py::test_the_mean_over_all_trained_tokens_is_not_the_mean_of_means",
            "test_reports.py::test_every_split_gives_every_type_the_same_gradient",
        ),
    ),
    19: Report(
        "batch size times accumulation gives another loss with packing",
        (
            "engine/test_accumulation.py::test_every_split_gives_the_same_gradient_and_the_same_loss",
            "engine/test_accumulation.py::test_only_the_product_of_batch_size_and_accumulation_means_anything",
        ),
    ),
    20: Report(
        "resuming in a later epoch replays the first one's order",
        (
            "data/test_sampler.py::test_resuming_inside_a_later_epoch_replays_no_earlier_order",
            "engine/test_kill.py::test_a_killed_run_goes_on_as_if_it_had_not_been",
            "engine/test_resume.py::test_stopped_and_resumed",
        ),
    ),
    23: Report(
        "a server refuses the adapter for tensors it does not know",
        (
            "peft/test_convert.py::test_keys_that_vllm_takes_and_no_other",
            "peft/test_check_vllm.py::test_tensor_problems_are_named",
            "peft/test_linear_folders.py::test_vllm_refuses_the_others_for_one_reason",
        ),
    ),
    25: Report(
        "merged into a quantised base, generations differ",
        (
            "models/test_merge.py::test_the_folder_says_what_it_is_made_of",
            "models/test_merge.py::test_a_half_precision_base",
            "cli/test_export.py::test_merged",
        ),
    ),
    26: Report(
        "a merge changes nothing, as names did not match",
        (
            "models/test_merge.py::test_what_does_not_fit_is_refused",
            "models/test_merge.py::test_a_change_lost_in_rounding_is_refused",
            "models/test_merge.py::test_a_merge_that_does_not_act_as_the_adapter_is_refused",
            "engine/test_merge.py::test_an_untrained_adapter_has_nothing_to_merge",
            "peft/test_folder.py::test_tensors_must_be_those_of_model_and_config",
        ),
    ),
    27: Report(
        "prefix tuning with activation checkpointing: the cache doubles",
        ("engine/test_recompute.py::test_every_type_trains_to_the_same_bits_with_it",),
    ),
    28: Report(
        "nothing in a batch is trained, the loss is NaN or 0, and the run succeeds",
        (
            "data/test_build.py::test_examples_without_a_target_are_dropped_with_a_warning",
            "data/test_dataset.py::test_a_file_of_only_untrainable_examples_fails",
            "engine/test_isolation.py::test_a_task_that_turns_non_finite_stops_alone_before_its_step",
            "engine/test_mixes.py::test_who_brings_nothing_to_learn_learns_nothing_and_is_in_nobodys_way",
        ),
    ),
    29: Report(
        "the same seed does not give the same adapter",
        (
            "engine/test_fidelity.py::test_the_seed_alone_makes_the_adapter",
            "peft/test_lora.py::test_start_values_follow_seed_and_name_alone",
            "test_reports.py::test_the_seed_alone_makes_the_adapter_of_any_type",
        ),
    ),
    30: Report(
        "a pickle in an adapter folder or a checkpoint runs code",
        (
            "peft/test_folder.py::test_a_pickle_is_refused_and_not_opened",
            "peft/test_folder.py::test_a_pickle_under_a_false_name_is_refused_and_not_run",
            "engine/test_checkpoint.py::test_a_pickle_is_never_loaded",
            "engine/test_training.py::test_a_pickle_to_start_from_is_refused",
            "models/test_layout.py::test_pickled_weights_are_refused_and_never_read",
        ),
    ),
    31: Report(
        "a chat template walks Python's internals, or never ends",
        (
            "data/test_sandbox.py::test_an_attack_costs_little_and_is_refused_by_name",
            "data/test_sandbox.py::test_memory_is_bounded_by_the_limit",
            "data/test_render.py::test_a_template_that_attacks_fails_the_whole_file_by_name",
        ),
    ),
}


@pytest.mark.parametrize("number", REPORTS)
def test_the_tests_of_a_report_are_there(number: int) -> None:
    for test in REPORTS[number].tests:
        file, _, name = test.partition("::")
        assert name in _tests_of(file), f"report {number} ({REPORTS[number].seen}) has lost {test}"


@cache
def _tests_of(file: str) -> frozenset[str]:
    """Names of the functions of a file that pytest takes as tests."""
    nodes = ast.parse((ROOT / file).read_text()).body
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


@pytest.fixture(scope="module")
def stopping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model whose tokenizer pads with its end of turn."""
    folder = tiny_folder(tmp_path_factory.mktemp("padded"), "llama")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"pad_token": config["eos_token"]}))
    yield folder


def test_a_model_whose_padding_is_its_end_of_turn_learns_to_stop(stopping: Path, tmp_path: Path) -> None:
    """Reports 8 and 9: twenty steps on four short examples, and greedy replies end by themselves."""
    rows = [
        {"messages": [{"role": "user", "content": f"Is {number} odd?"}, {"role": "assistant", "content": "yes"}]}
        for number in range(4)
    ]
    data = tmp_path / "short.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = LocalEngine(str(stopping), threads=1, cache_dir=tmp_path / "cache")
    assert engine.preparer.tokenizer.pad_id == engine.preparer.tokenizer.eos_id == END_OF_TURN_ID
    job = JobSpec(
        name="stops", datasets=[str(data)], peft={"type": "lora", "r": 8}, max_steps=20, learning_rate=3e-2,
        per_device_train_batch_size=4,
    )  # fmt: skip
    task = engine.attach(job)
    before = engine.sample("Is 3 odd?", task=task, max_new_tokens=40)
    list(engine.run())
    assert engine.sample("Is 3 odd?", task=task, max_new_tokens=40) == "yes" != before


def test_a_co_runner_four_times_as_long_changes_no_loss() -> None:
    """Report 11, over whole runs, for tasks of all types."""
    backbone = backbone_of("qwen2")
    trials = [trial for trial in cast("llama") if trial.name in ("lora", "ia3", "prefix", "prompt", "norms")]
    for trial in trials:
        long = PeftTrial("long", trials[0].peft, [4 * length for length in trial.lengths], steps=trial.steps, seed=9)
        alone, beside = (_losses(backbone, members)[trial.name] for members in ([trial], [trial, long]))
        assert alone == beside and len(alone) == trial.steps


def _losses(backbone: Backbone, trials: Sequence[PeftTrial]) -> dict[str, list[float]]:
    engine = Engine(backbone)
    for trial in trials:
        attach(engine, trial)
    return {name: [step.loss for step in steps] for name, steps in run(engine).items()}


@pytest.mark.parametrize("arch", ARCHS)
def test_of_any_types_those_that_take_part_are_trained_and_nothing_else(arch: str) -> None:
    """Report 14: counted by what got a gradient, against what each spec says it trains."""
    backbone = backbone_of(arch, torch.float64)
    engine = Engine(backbone)
    with exact(torch.float64):
        tasks = [attach(engine, trial) for trial in cast(arch)]
        part = tasks[::2]
        kept = {task.name: task.adapter.state() for task in tasks}
        engine.forward_backward({task: list(task.data.train) for task in part})
        for task in tasks:
            touched = int((task.adapter.parameters.gradient != 0).sum())
            trains = task.job.peft.parameters(backbone.places)
            assert task.adapter.parameters.count == trains
            # rectified units may all be off, and a key's bias has a gradient of rounding alone
            assert touched == 0 if task not in part else 0.6 * trains < touched <= trains
        for task in part:
            engine.optim_step(task)
    for task in tasks:
        moved = {name for name, value in task.adapter.state().items() if not torch.equal(value, kept[task.name][name])}
        assert moved <= (task.adapter.parameters.views.keys() if task in part else set())
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in backbone.model.parameters())


@pytest.mark.parametrize("arch", ARCHS)
def test_every_split_gives_every_type_the_same_gradient(arch: str) -> None:
    """Reports 18 and 19: lengths 3, 30, 7 and 60 as one chunk, two or four."""
    backbone = backbone_of(arch, torch.float64)
    examples = list(random_sequences([3, 30, 7, 60], seed=1))
    with exact(torch.float64):
        for trial in cast(arch):
            whole, *split = (_step(backbone, trial, examples, budget) for budget in (1000, 70, 1))
            for gradient, loss in split:
                assert loss == pytest.approx(whole[1], rel=1e-12)
                assert float((gradient - whole[0]).norm()) <= 1e-11 * float(whole[0].norm()), trial.name


def _step(backbone: Backbone, trial: PeftTrial, examples: list[object], budget: int) -> tuple[torch.Tensor, float]:
    engine = Engine(backbone)
    task = attach(engine, trial)
    task.chunk_tokens = budget
    outcome = engine.forward_backward({task: examples})[trial.name]
    return task.adapter.parameters.gradient.clone(), outcome.loss_sum / outcome.tokens


def test_the_seed_alone_makes_the_adapter_of_any_type() -> None:
    """Report 29: with others before it or none, whatever torch's own generator holds; another seed, another adapter,
    where the type draws anything."""
    backbone = backbone_of("llama")
    for trial in cast("llama"):
        one, other = (_from_seed(backbone, trial, others) for others in ([], cast("llama")[:3]))
        assert one == other, trial.name
        again = _from_seed(backbone, trial, [], seed=99)
        assert (again != one) == (trial.name not in ("pissa", "ia3", "bitfit", "norms"))


def _from_seed(
    backbone: Backbone, trial: PeftTrial, others: Sequence[PeftTrial], *, seed: int | None = None
) -> list[bytes]:
    """The adapter at its start and after its steps, as bytes."""
    torch.manual_seed(len(others))
    engine = Engine(backbone)
    for other in others:
        if other.name != trial.name:
            _fresh(engine, other)
    job = trial.job if seed is None else trial.job.model_copy(update={"seed": seed})
    task = engine.attach(job, Sequences(trial.examples), chunk_tokens=trial.chunk_tokens)
    found = [_bytes(task)]
    run(engine)
    return [*found, _bytes(task)]


def _fresh(engine: Engine, trial: PeftTrial) -> Task:
    return engine.attach(trial.job, Sequences(trial.examples), chunk_tokens=trial.chunk_tokens)


def _bytes(task: Task) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in task.adapter.state().values())
