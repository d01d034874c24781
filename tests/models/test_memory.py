"""The estimate of memory against what models really hold: weights to the byte, activations within a factor."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from muxtune.models import attention
from muxtune.models.attach import LinearOp, Pass
from muxtune.models.attention import AttentionContext, Segment
from muxtune.models.backbone import Backbone, BlockChoice
from muxtune.models.memory import Footprint, footprint, memory_here
from tests.peak import peak_bytes
from tests.tiny import SUPPORTED, tiny_folder, tiny_model

ROWS, LENGTH = 128, 32
BLOCKS = ("transformers", "auto")


class _Adapted(torch.autograd.Function):
    """What an adapter at every linear costs, its own rank aside: the linear's input is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: LinearOp, leaf: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.op = op
        return op.forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.op.input_gradient(grads[0]), None, None


def adapted_pass(backbone: Backbone, *, recompute: bool = False) -> Tensor:
    """The last rows of a pass with an adapter at every linear."""
    leaf = torch.zeros(1, requires_grad=True)
    context = AttentionContext([Segment(LENGTH)] * (ROWS // LENGTH))
    current = Pass(context, {name: lambda op, x: _Adapted.apply(x, op, leaf) for name in backbone.products})
    positions = torch.arange(LENGTH).repeat(ROWS // LENGTH)
    return backbone.hidden(torch.zeros(ROWS, dtype=torch.long), positions, current, recompute=recompute)


def kept_bytes(backbone: Backbone) -> int:
    """Bytes that autograd keeps of a forward pass, each storage once, weights aside."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in backbone.model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)  # alive, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        adapted_pass(backbone)
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in weights)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("arch", SUPPORTED)
def test_activations_are_estimated_with_room(arch: str, block: BlockChoice, tmp_path: Path) -> None:
    """At least what autograd keeps and the buffers of the backward pass (a fifth at this size), at most twice it."""
    attention.register()
    found = footprint(tiny_folder(tmp_path, arch), torch.float32, block)
    backbone = Backbone(tiny_model(arch), block)
    assert found.block == backbone.block
    estimated = found.activation_bytes(ROWS, LENGTH) - found.head_bytes
    kept = kept_bytes(backbone)
    assert 1.2 * kept <= estimated <= 2.2 * kept


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("arch", SUPPORTED)
def test_recomputed_activations_are_estimated_with_room(arch: str, block: BlockChoice, tmp_path: Path) -> None:
    """Against the true peak of both passes, which allocations tell; a process's own is up to a half above it."""
    attention.register()
    found = footprint(tiny_folder(tmp_path, arch, layers=6), torch.float32, block)
    lean = found.recomputed()
    estimated = lean.activation_bytes(ROWS, LENGTH) - lean.head_bytes
    backbone = Backbone(tiny_model(arch, layers=6), block)

    def both_passes() -> None:
        adapted_pass(backbone, recompute=True).sum().backward()

    both_passes()
    assert 1.0 <= estimated / peak_bytes(both_passes) <= 3.2
    assert lean.recompute and lean.row_bytes < found.row_bytes


@pytest.mark.parametrize("arch", ["llama-tied", "gpt2", "opt-350m"])
def test_weights_and_attach_points_are_exact(arch: str, tmp_path: Path) -> None:
    attention.register()
    backbone = Backbone(tiny_model(arch))
    found = footprint(tiny_folder(tmp_path, arch), torch.bfloat16)
    assert found.weights_bytes == 2 * sum(parameter.numel() for parameter in backbone.model.parameters())
    assert found.places == backbone.places
    assert found.linears == {name: (op.in_features, op.out_features) for name, op in backbone.attach_points.items()}
    assert found.layer_weights == sum(op.weight.numel() for op in backbone.attach_points.values())


def test_nothing_is_loaded(tmp_path: Path) -> None:
    """The weights' file is not even opened."""
    folder = tiny_folder(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    assert footprint(folder, torch.float32).row_bytes > 0


def test_rows_within_is_the_inverse() -> None:
    model = Footprint(0, 1000, 10, 5000, 0, 0, {})
    for rows in (1, 7, 512):
        need = model.activation_bytes(rows, longest=30)
        assert model.rows_within(need, 30) == rows and model.rows_within(need - 1, 30) == rows - 1


def test_memory_here_is_of_this_machine() -> None:
    used, free = memory_here(torch.device("cpu"))
    assert used > 50 * 2**20 and free > 0
    with mmap.mmap(-1, 64 * 2**20) as held:  # pages of its own, whatever the allocator has kept of earlier tests
        held.write(bytes(len(held)))
        assert memory_here(torch.device("cpu"))[0] - used > 32 * 2**20


@pytest.mark.parametrize(("limit", "usage", "free"), [("1000\n", "400\n", 600), ("300", "400", 0)])
def test_a_container_limit_counts(
    limit: str, usage: str, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "max").write_text(limit)
    (tmp_path / "current").write_text(usage)
    paths = ((str(tmp_path / "max"), str(tmp_path / "current")),)
    monkeypatch.setattr("muxtune.models.memory._CGROUP_LIMITS", paths)
    assert memory_here(torch.device("cpu"))[1] == free
    (tmp_path / "max").write_text("max\n")
    assert memory_here(torch.device("cpu"))[1] > 10_000
