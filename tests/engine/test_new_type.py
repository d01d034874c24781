"""A type that is entered in the tables alone is one everywhere: config, training in any company, folders, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from muxtune.engine.local import LocalEngine
from muxtune.engine.training import TrainingRun
from muxtune.errors import AdapterError, ConfigError
from muxtune.peft.registry import build_adapter, changes, read_stored
from muxtune.spec.job import JobSpec
from muxtune.spec.peft import Lora, read_peft
from tests.engine.build import CPU, backbone_of, exact
from tests.engine.prompts import PeftTrial
from tests.engine.runs import assert_same_result, run_of
from tests.engine.selective import relative, start_of, train
from tests.engine.toy_type import ScaleShift, register
from tests.reference_types import Plain, train_plain
from tests.tiny import tiny_folder, tiny_model

TOY = PeftTrial("toy", ScaleShift(), [3, 20, 7, 12], batch=2, weight_decay=0.1, seed=1)
LORA = PeftTrial("lora", Lora(r=3, lora_dropout=0.3), [10, 31, 2], batch=1, seed=2, chunk_tokens=48)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def test_it_is_known_by_its_name() -> None:
    assert read_peft({"type": "scale_shift", "target_modules": "up_proj"}) == ScaleShift(target_modules=("up_proj",))
    with pytest.raises(ConfigError, match="did you mean 'scale_shift'"):
        read_peft("scale-shift")  # with a hyphen


def test_its_spec_counts_what_is_built() -> None:
    backbone = backbone_of()
    adapter = build_adapter(ScaleShift(), backbone, seed=0, dtype=torch.float32, device=CPU)
    assert adapter.parameters.count == ScaleShift().parameters(backbone.places)


def test_beside_lora_it_trains_what_the_equation_says() -> None:
    ours = train(backbone_of(dtype=torch.float64), [LORA, TOY])["toy"]
    plain = _plain(tiny_model("llama", dtype=torch.float64))
    plain.load(start_of(backbone_of(dtype=torch.float64), TOY).parameters.export())
    with exact(torch.float64):
        theirs = train_plain(plain, TOY.batches, learning_rate=TOY.learning_rate, weight_decay=TOY.weight_decay)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    assert relative(ours.values, theirs.values) < 1e-9


def test_alone_is_together_bit_for_bit() -> None:
    backbone = backbone_of()
    together = train(backbone, [LORA, TOY])
    for trial in (LORA, TOY):
        alone = train(backbone, [trial])[trial.name]
        assert alone.losses == together[trial.name].losses
        assert all(torch.equal(value, together[trial.name].values[key]) for key, value in alone.values.items())


def test_a_run_of_it_stops_resumes_answers_and_is_not_merged(data: Path, tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model", "llama")
    job = JobSpec(name="toy", datasets=[str(data / "sql.jsonl")], peft="scale_shift", max_steps=4, save_steps=1)
    for output, rounds in (("whole", 9), ("cut", 2), ("cut", 9)):
        run = run_of(model, tmp_path / output, [job])
        assert list(TrainingRun(run, resume=True, stop=_after(rounds)).events())
    assert_same_result(tmp_path / "whole" / "toy", tmp_path / "cut" / "toy")
    engine = LocalEngine(str(model))
    task = engine.load(tmp_path / "whole" / "toy", name="toy")
    assert isinstance(task.job.peft, ScaleShift) and not torch.equal(task.adapter.parameters.values, _fresh(engine))
    assert engine.generate([(task, "How many?"), (None, "How many?")], max_new_tokens=3)
    stored = read_stored(tmp_path / "whole" / "toy", engine.backbone, base_sha256=engine.base.weights_sha256)
    with pytest.raises(AdapterError, match="cannot be merged"):
        changes(stored, engine.backbone)


def _fresh(engine: LocalEngine) -> Tensor:
    adapter = build_adapter(ScaleShift(), engine.backbone, seed=0, dtype=torch.float32, device=CPU)
    return adapter.parameters.values


def _after(rounds: int) -> Callable[[], bool]:
    left = iter(range(rounds))
    return lambda: next(left, None) is None


def _plain(model: nn.Module) -> Plain:
    """Every linear of the layers, scaled and shifted by hooks."""
    model.requires_grad_(False)
    trained: dict[str, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and ".layers." in name:
            for part, start in (("scale", torch.ones), ("shift", torch.zeros)):
                module.register_parameter(part, nn.Parameter(start(module.out_features, dtype=torch.float64)))
                trained[f"{name}.{part}"] = getattr(module, part)
            module.register_forward_hook(_hook)
    return Plain(model, trained)


def _hook(module: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output * module.scale + module.shift
