"""Layers as subgraphs: which models are cut, and that any range of layers comes to what autograd makes of the chain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from muxtune.engine.layout import Layout
from muxtune.models.attach import Pass
from muxtune.models.attention import AttentionContext
from muxtune.models.backbone import Backbone
from muxtune.parallel.adapters import sharded_adapter
from muxtune.parallel.chain import WholeLayers
from muxtune.parallel.mesh import ALONE, Sum, TensorAxis
from muxtune.parallel.steps import run_plain
from muxtune.parallel.subgraphs import CutLayers, Subgraphs
from muxtune.parallel.tensor import ShardedBackbone, load_sharded
from muxtune.peft.base import Dispatch
from muxtune.peft.multiplex import hooks
from muxtune.peft.registry import build_adapter
from muxtune.spec.peft import IA3, BitFit, Bottleneck, LnTuning, Lora, PeftBase
from tests.engine.build import CPU, backbone_of

ROWS = 16


class Nobody(TensorAxis):
    """An axis whose other rank has nothing to add."""

    def sum_(self, value: Tensor) -> Tensor:
        """As it is."""
        return value

    def start_sum(self, value: Tensor) -> Sum:
        """As it is."""
        return Sum(value, ALONE)


def _load(path: Path) -> ShardedBackbone:
    return load_sharded(path, Nobody(0, 2), dtype=torch.float64, device=CPU)


@pytest.mark.parametrize("arch", ["llama", "llama-uneven", "mistral", "qwen2", "qwen3", "gpt2"])
def test_layers_whose_norms_come_first_are_cut(arch: str, folder: Callable[[str], Path]) -> None:
    backbone = _load(folder(arch))
    cut = Subgraphs(backbone).layers
    assert len(cut) == len(backbone.blocks)
    for index, layer in enumerate(cut):
        attention, mlp = layer.sublayers
        assert attention.layer == mlp.layer == index and attention.op is None and mlp.op is not None


@pytest.mark.parametrize("arch", ["gemma2", "gemma3-two", "opt", "opt-350m"])
def test_others_run_whole(arch: str, folder: Callable[[str], Path]) -> None:
    assert not Subgraphs(_load(folder(arch))).cut


def test_a_backbone_of_one_device_runs_whole() -> None:
    assert not Subgraphs(backbone_of("llama", torch.float64)).cut


def test_layers_that_add_elsewhere_are_not_cut(folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose norm reads other rows than the sum of before (a parallel block, say)."""
    backbone = _load(folder("llama"))
    layer = backbone.model.get_submodule("model.layers.0")

    def parallel(self: torch.nn.Module, x: Tensor, **given: object) -> Tensor:
        h = self.input_layernorm(x)
        return x + self.self_attn(hidden_states=h)[0] + self.mlp(self.post_attention_layernorm(h))

    monkeypatch.setattr(type(layer), "forward", parallel)
    assert not Subgraphs(backbone).cut


SPECS: list[PeftBase] = [
    Lora(r=3),
    IA3(),
    BitFit(),
    LnTuning(),
    Bottleneck(placement="houlsby", bottleneck_size=5),
    Bottleneck(placement="parallel", bottleneck_size=5),
]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_subgraphs_equal_autograd_to_the_bit(arch: str, recompute: bool, folder: Callable[[str], Path]) -> None:
    """Rows, their gradient and every parameter's, over all layers and over the last alone."""
    backbone = _load(folder(arch))
    for spec in SPECS:
        for layers in (range(2), range(1, 2)):
            cut, whole = (_ran(backbone, spec, layers, recompute, kind) for kind in (CutLayers, WholeLayers))
            assert cut.keys() == whole.keys()
            for name, value in cut.items():
                assert torch.equal(value, whole[name]), (type(spec).__name__, name)


def _ran(backbone: ShardedBackbone, spec: PeftBase, layers: range, recompute: bool, kind: type) -> dict[str, Tensor]:
    adapter = sharded_adapter(spec, backbone, seed=3, dtype=torch.float64, device=CPU).adapter
    generator = torch.Generator().manual_seed(1)
    for view in adapter.parameters.views.values():
        view.detach().add_(0.1 * torch.randn(view.shape, generator=generator, dtype=view.dtype))
    current, prelude = _pass(backbone, adapter)
    subgraphs = Subgraphs(backbone)
    if kind is WholeLayers:
        subgraphs.layers = []
    chain = subgraphs.chain(prelude, current, layers=layers, recompute=recompute)
    assert isinstance(chain, kind)
    x_TD = torch.randn(prelude.x_TD.shape, generator=generator, dtype=torch.float64).requires_grad_()
    y_TD = run_plain(chain.forward(x_TD))
    assert y_TD.requires_grad and y_TD.is_leaf
    grad_TD = run_plain(chain.backward(torch.randn(y_TD.shape, generator=generator, dtype=torch.float64)))
    assert grad_TD is not None
    return {"rows": y_TD.detach(), "rows' gradient": grad_TD, "parameters": adapter.parameters.gradient.clone()}


def _pass(backbone: Backbone, adapter: object) -> tuple[Pass, object]:
    layout = Layout()
    for length in (9, 7):
        layout.add(torch.arange(length).numpy().astype("int32"), None)
    rows = layout.finish(CPU)
    current = Pass(AttentionContext(rows.segments), hooks([Dispatch(0, ROWS, adapter, None)]))
    return current, backbone.begin(rows.ids_T, rows.positions_T, current)


def test_without_anything_that_trains_nothing_comes_back(folder: Callable[[str], Path]) -> None:
    backbone = _load(folder("llama"))
    adapter = build_adapter(
        LnTuning(target_modules=("model.layers.1.input_layernorm",)), backbone, seed=0, dtype=torch.float64, device=CPU
    )
    current, prelude = _pass(backbone, adapter)
    subgraphs = Subgraphs(backbone)
    first = subgraphs.chain(prelude, current, layers=range(1))
    y_TD = run_plain(first.forward(prelude.x_TD))
    assert not y_TD.requires_grad
    second = subgraphs.chain(prelude, current, layers=range(1, 2))
    z_TD = run_plain(second.forward(y_TD))
    assert z_TD.requires_grad
    sums = list(second.backward(torch.ones_like(z_TD)))
    assert len(sums) == 2  # of the layer's two sublayers; its first norm trains
    assert adapter.parameters.gradient.abs().sum() > 0
    assert not list(first.backward(torch.ones_like(y_TD)))


def test_kept_rows_are_given_back(folder: Callable[[str], Path]) -> None:
    """Two passes with the same chain are refused until the first has come back."""
    backbone = _load(folder("llama"))
    adapter = build_adapter(Lora(r=2), backbone, seed=0, dtype=torch.float64, device=CPU)
    current, prelude = _pass(backbone, adapter)
    chain = Subgraphs(backbone).chain(prelude, current, layers=range(2))
    y_TD = run_plain(chain.forward(prelude.x_TD))
    with pytest.raises(AssertionError, match="goes forward once"):
        run_plain(chain.forward(prelude.x_TD))
    run_plain(chain.backward(torch.ones_like(y_TD)))
    run_plain(chain.forward(prelude.x_TD))
