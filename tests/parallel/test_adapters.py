"""What adapters on ranks are: which types have a rule, and that the whole is put together as one device has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from muxtune.errors import AdapterError
from muxtune.models.backbone import Backbone
from muxtune.parallel.adapters import sharded_adapter
from muxtune.parallel.mesh import TensorAxis
from muxtune.parallel.rules import RULES
from muxtune.parallel.slices import Slice
from muxtune.parallel.tensor import ShardedBackbone, load_sharded
from muxtune.peft.registry import build_adapter, payload
from muxtune.spec.peft import IA3, PEFT_SPECS, LnTuning, Lora, PeftBase, Shira
from tests.engine.build import CPU
from tests.parallel.ranks import RankGroup
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def backbone(folder: Callable[[str], Path]) -> ShardedBackbone:
    """Rank 1 of two, which nobody runs."""
    return load_sharded(folder("llama-uneven"), TensorAxis(1, 2), dtype=torch.float64, device=CPU)


def test_every_type_has_a_rule() -> None:
    assert RULES.keys() == set(PEFT_SPECS.values())


def test_a_type_without_a_rule_is_refused(backbone: ShardedBackbone) -> None:
    class Stranger(Lora):
        pass

    with pytest.raises(AdapterError, match="cannot be split over ranks") as refused:
        sharded_adapter(Stranger(), backbone, seed=0, dtype=torch.float64, device=CPU)
    assert "tp: 1" in str(refused.value)


def test_a_rank_has_its_ranges_of_the_start_values_of_one_device(backbone: ShardedBackbone) -> None:
    sharded = sharded_adapter(Lora(r=4), backbone, seed=3, dtype=torch.float64, device=CPU)
    whole = build_adapter(
        Lora(r=4), Backbone(tiny_model("llama-uneven"), "transformers"), seed=3, dtype=torch.float64, device=CPU
    ).state()
    assert sharded.placements.keys() == whole.keys()
    own = sharded.adapter.state()
    kinds = {"self_attn.q_proj.lora_A": "partial", "self_attn.o_proj.lora_B": "partial"}
    for name, placement in sharded.placements.items():
        expected = placement.of(whole[name]) if isinstance(placement, Slice) else whole[name]
        assert torch.equal(own[name], expected), name
        for ending, kind in kinds.items():
            assert not name.endswith(ending) or placement == kind
    assert sum(value.numel() for value in own.values()) < 0.8 * sum(value.numel() for value in whole.values())


def test_the_whole_adapter_exports_as_from_one_device(pair: RankGroup, folder: Callable[[str], Path]) -> None:
    """The same folder: config and tensors."""
    dora, pissa = Lora(r=4, use_dora=True), Lora(r=4, init_lora_weights="pissa")
    for spec in (Lora(r=4), IA3(), dora, pissa, Shira(r=3), Lora(target_modules=("embed_tokens", "lm_head"))):
        view = Backbone(tiny_model("llama-uneven"), "transformers")
        expected = payload(spec, build_adapter(spec, view, seed=5, dtype=torch.float64, device=CPU), view)
        for config, tensors in pair.ask(_exported, folder("llama-uneven"), spec):
            assert config == expected.config
            assert tensors.keys() == expected.tensors.keys()
            assert all(torch.allclose(tensors[name], value) for name, value in expected.tensors.items())


def _exported(axis: TensorAxis, path: Path, spec: PeftBase) -> tuple[object, dict[str, torch.Tensor]]:
    backbone = load_sharded(path, axis, dtype=torch.float64, device=CPU)
    sharded = sharded_adapter(spec, backbone, seed=5, dtype=torch.float64, device=CPU)
    whole = build_adapter(spec, backbone.whole, seed=0, dtype=torch.float64, device=CPU)
    whole.load(sharded.whole_state())
    made = payload(spec, whole, backbone.whole)
    return made.config, dict(made.tensors)


def test_tensors_beside_the_parameters_are_parted_as_they_are(pair: RankGroup, folder: Callable[[str], Path]) -> None:
    """An optimizer's moments, say: to the ranks and back."""
    for spec in (Lora(r=4, use_dora=True), Lora(r=4, init_lora_weights="pissa"), Shira(r=3), IA3(), LnTuning()):
        for there, back in pair.ask(_there_and_back, folder("llama-uneven"), spec):
            assert there.keys() == back.keys()
            assert all(torch.equal(value, back[name]) for name, value in there.items())


def _there_and_back(axis: TensorAxis, path: Path, spec: PeftBase) -> tuple[dict[str, torch.Tensor], object]:
    backbone = load_sharded(path, axis, dtype=torch.float64, device=CPU)
    sharded = sharded_adapter(spec, backbone, seed=5, dtype=torch.float64, device=CPU)
    generator = torch.Generator().manual_seed(0)
    whole = build_adapter(spec, backbone.whole, seed=5, dtype=torch.float64, device=CPU).parameters.views
    drawn = {name: torch.randn(view.shape, generator=generator, dtype=torch.float64) for name, view in whole.items()}
    own = sharded.own(drawn)
    assert {name: value.shape for name, value in own.items()} == {
        name: view.shape for name, view in sharded.adapter.parameters.views.items()
    }
    return drawn, sharded.whole(own)


def test_places_of_another_seed_are_refused(pair: RankGroup, folder: Callable[[str], Path]) -> None:
    assert all("other" in told and "tp: 1" in told for told in pair.ask(_other_places, folder("llama")))


def _other_places(axis: TensorAxis, path: Path) -> str:
    backbone = load_sharded(path, axis, dtype=torch.float64, device=CPU)
    sharded = sharded_adapter(Shira(r=3), backbone, seed=5, dtype=torch.float64, device=CPU)
    other = build_adapter(Shira(r=3), backbone.whole, seed=6, dtype=torch.float64, device=CPU)
    try:
        sharded.load_whole(other.state())
    except AdapterError as error:
        return str(error)
    return ""
