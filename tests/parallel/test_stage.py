"""Stages of every family, one after another in one process, are the whole model; and each holds its own part alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from muxtune.errors import ConfigError
from muxtune.models import attention
from muxtune.models.attach import Pass
from muxtune.models.attention import AttentionContext, Segment
from muxtune.models.backbone import Backbone, BlockChoice
from muxtune.models.weights import load_model
from muxtune.parallel.mesh import ALONE
from muxtune.parallel.pipe import Mesh, PipeAxis
from muxtune.parallel.stage import StagedBackbone, load_stage
from tests.engine.build import CPU
from tests.parallel.trained import folder_of

FAMILIES = ("llama", "llama-tied", "gpt2", "gemma2", "gemma3", "opt", "opt-350m", "qwen2", "qwen3", "mistral")
IDS_T = torch.arange(3, 35)
POSITIONS_T = torch.cat([torch.arange(20), torch.arange(12)])


def _stages(path: Path, stages: int, block: BlockChoice = "auto") -> list[StagedBackbone]:
    found = []
    for number in range(stages):
        mesh = Mesh(ALONE, pipe=PipeAxis(number, stages))
        backbone = load_stage(path, mesh, dtype=torch.float64, device=CPU, block=block)
        assert isinstance(backbone, StagedBackbone)
        found.append(backbone)
    return found


def _pass() -> Pass:
    return Pass(AttentionContext([Segment(20), Segment(12)]))


def _through(stages: list[StagedBackbone]) -> Tensor:
    """Logits."""
    rows_TD = None
    for backbone in stages:
        current = _pass()
        prelude = backbone.begin(IDS_T, POSITIONS_T, current)
        rows_TD = prelude.x_TD if rows_TD is None else rows_TD
        for layer in backbone.stage.layers:
            rows_TD = backbone.blocks[layer].forward(rows_TD, prelude, current)
    assert rows_TD is not None
    return backbone.head.logits(backbone.finish(rows_TD, current))


@pytest.mark.parametrize("block", ["auto", "transformers"])
@pytest.mark.parametrize("arch", FAMILIES)
@torch.no_grad()
def test_stages_one_after_another_are_the_model(arch: str, block: BlockChoice, folder: Callable[[str], Path]) -> None:
    attention.register()
    model = load_model(folder_of(folder(arch)), dtype=torch.float64, device="cpu", attn_implementation="eager")
    whole = Backbone(model, block)
    expected = whole.head.logits(whole.hidden(IDS_T, POSITIONS_T, _pass()))
    stages = _stages(folder(arch), 2, block)
    assert [list(one.stage.layers) for one in stages] == [[0], [1]]
    assert {one.block for one in stages} == {whole.block}
    assert torch.equal(_through(stages), expected)


@pytest.mark.parametrize("arch", ["llama", "llama-tied", "gpt2"])
def test_a_stage_has_memory_for_its_own_part_alone(arch: str, folder: Callable[[str], Path]) -> None:
    """Of each layer one stage has all; of the ends those at them, a tied table both."""
    first, last = (_held(one) for one in _stages(folder(arch), 2))
    tied = arch != "llama"
    both = first & last
    assert not any(".0." in name for name in last) and not any(".1." in name for name in first)
    assert any(".0." in name for name in first) and any(".1." in name for name in last)
    tables = {name for name in first | last if "embed_tokens" in name or "wte" in name or "lm_head" in name}
    assert both == {name for name in both if "wpe" in name} | (tables if tied else set())
    assert len(tables) == (1 if tied else 2)


def _held(backbone: StagedBackbone) -> set[str]:
    return {name for name, parameter in backbone.model.named_parameters() if not parameter.is_meta}


def test_more_stages_than_layers_are_refused(folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="3 stages, but the model has 2 layers"):
        _stages(folder("llama"), 3)
