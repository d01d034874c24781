"""Adapters over stages: whose each parameter is, start values, and that wrong specs are found out on every stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from muxtune.errors import AdapterError
from muxtune.models import attention
from muxtune.models.backbone import Backbone
from muxtune.models.weights import load_model
from muxtune.parallel.mesh import ALONE, TensorAxis
from muxtune.parallel.pipe import Mesh, PipeAxis
from muxtune.parallel.stage import ShardedStage, StagedBackbone, load_stage
from muxtune.parallel.staged import StagedAdapter, StageNorm, staged_adapter
from muxtune.peft.registry import build_adapter
from muxtune.spec.peft import IA3, BitFit, Bottleneck, LnTuning, Lora, PeftBase, PrefixTuning, PromptTuning, Shira
from tests.engine.build import CPU
from tests.parallel.trained import folder_of

SPECS: list[PeftBase] = [
    Lora(r=4),
    Lora(r=4, use_dora=True),
    Lora(r=4, init_lora_weights="pissa"),
    Lora(r=2, target_modules=("lm_head", "embed_tokens", "q_proj")),
    IA3(),
    BitFit(),
    Bottleneck(placement="parallel", bottleneck_size=3),
    LnTuning(),
    Shira(),
    PrefixTuning(num_virtual_tokens=3),
    PromptTuning(num_virtual_tokens=3),
]


@pytest.fixture(scope="module")
def stages(folder: Callable[[str], Path]) -> Sequence[StagedBackbone | ShardedStage]:
    """Two, which nobody runs."""
    meshes = [Mesh(ALONE, pipe=PipeAxis(stage, 2)) for stage in range(2)]
    return [load_stage(folder("llama"), mesh, dtype=torch.float64, device=CPU) for mesh in meshes]


def _made(spec: PeftBase, stages: Sequence[StagedBackbone | ShardedStage]) -> list[StagedAdapter]:
    return [staged_adapter(spec, one, seed=3, dtype=torch.float64, device=CPU) for one in stages]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_stages_share_out_what_one_device_has(
    spec: PeftBase, stages: Sequence[StagedBackbone], folder: Callable[[str], Path]
) -> None:
    attention.register()
    model = load_model(folder_of(folder("llama")), dtype=torch.float64, device="cpu", attn_implementation="eager")
    whole = build_adapter(spec, Backbone(model), seed=3, dtype=torch.float64, device=CPU).state()
    first, second = (one.adapter.state() for one in _made(spec, stages))
    assert not first.keys() & second.keys()
    found = first | second
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], value) for name, value in whole.items())
    assert not any(".1." in name for name in first) and not any(".0." in name for name in second)


@pytest.mark.parametrize(
    ("spec", "lowest", "counts"),
    [
        (Lora(r=2, target_modules=("lm_head",)), 1, (0, 1)),
        (Lora(r=2, target_modules=("embed_tokens",)), 0, (1, 0)),
        (Lora(r=2, target_modules=("model.layers.1.self_attn.q_proj",)), 1, (0, 1)),
        (LnTuning(target_modules=("model.norm",)), 1, (0, 1)),
        (IA3(target_modules=("model.layers.0.mlp.up_proj",), feedforward_modules=()), 0, (1, 0)),
        (PromptTuning(num_virtual_tokens=3), 0, (1, 0)),
        (PrefixTuning(num_virtual_tokens=3), 0, (1, 1)),
    ],
    ids=str,
)
def test_a_stage_may_have_nothing_of_an_adapter(
    spec: PeftBase, lowest: int, counts: tuple[int, int], stages: Sequence[StagedBackbone]
) -> None:
    found = _made(spec, stages)
    assert [min(1, one.adapter.parameters.count) for one in found] == list(counts)
    assert {one.lowest for one in found} == {lowest}
    assert len({one.adapter.lead for one in found}) == 1  # rows are laid out alike everywhere
    for one in found:
        one.adapter.refresh()
        assert one.norm.square() == 0


@pytest.mark.parametrize(
    "spec", [Lora(target_modules=("q_proj", "nowhere")), LnTuning(target_modules=("nowhere",))], ids=str
)
def test_a_target_that_no_stage_has_is_refused_by_each(spec: PeftBase, stages: Sequence[StagedBackbone]) -> None:
    told = set()
    for one in stages:
        with pytest.raises(AdapterError, match="'nowhere' match no") as refused:
            staged_adapter(spec, one, seed=3, dtype=torch.float64, device=CPU)
        told.add(str(refused.value))
    assert len(told) == 1


@pytest.mark.parametrize("spec", [Lora(r=4), PrefixTuning(num_virtual_tokens=3), LnTuning()], ids=str)
def test_ranks_of_a_stage_have_their_ranges_of_its_part(spec: PeftBase, folder: Callable[[str], Path]) -> None:
    mesh = Mesh(TensorAxis(2, 4), TensorAxis(0, 2), PipeAxis(1, 2))
    backbone = load_stage(folder("llama"), mesh, dtype=torch.float64, device=CPU)
    staged = staged_adapter(spec, backbone, seed=3, dtype=torch.float64, device=CPU)
    alone = load_stage(folder("llama"), Mesh(ALONE, pipe=PipeAxis(1, 2)), dtype=torch.float64, device=CPU)
    whole = staged_adapter(spec, alone, seed=3, dtype=torch.float64, device=CPU).adapter.state()
    assert staged.adapter.state().keys() == whole.keys()
    own = staged.own(whole)
    assert all(torch.equal(value, own[name]) for name, value in staged.adapter.state().items())


def test_a_norm_is_told_once_a_step() -> None:
    norm = StageNorm(lambda: 3.0)
    assert norm.square() == 9.0
    norm.tell(5.0)
    assert norm() == 5.0
    with pytest.raises(AssertionError, match="before the stages have told"):
        norm()
