"""Specs of LoRA's kin and of IA3: what they accept, and what they cost against what is built and computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from muxtune.errors import ConfigError
from muxtune.peft.base import Dispatch
from muxtune.peft.dropout import row_keys
from muxtune.peft.multiplex import hooks
from muxtune.peft.registry import build_adapter
from muxtune.spec import IA3, Job, JobSpec, Lora, Place
from muxtune.spec.peft import PeftBase, read_peft
from tests.engine.build import CPU, backbone_of
from tests.peft.frozen import FrozenLinear

KIN = {
    "dora": Lora(use_dora=True),
    "rslora": Lora(use_rslora=True),
    "pissa": Lora(init_lora_weights="pissa"),
    "ia3": IA3(),
}


@pytest.mark.parametrize("name", KIN)
def test_short_names_stand_for_settings(name: str) -> None:
    assert read_peft(name) == KIN[name]
    assert read_peft({"type": name.upper()}) == KIN[name]
    again = JobSpec.model_validate_json(Job(name="a", datasets=["d.jsonl"], peft=name).model_dump_json())
    assert again.peft == KIN[name]


def test_kin_of_lora_by_its_keys() -> None:
    assert read_peft({"use_dora": False, "use_rslora": "false", "init_lora_weights": "true"}) == Lora()
    assert read_peft({"use_dora": "yes", "use_rslora": True}) == Lora(use_dora=True, use_rslora=True)
    assert read_peft({"type": "pissa", "r": 2, "init_lora_weights": "PiSSA"}).r == 2  # type: ignore[attr-defined]
    assert Lora(r=4, lora_alpha=8, use_rslora=True).scaling == 4.0


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"use_dora": "maybe"}, "use_dora"),
        ({"init_lora_weights": False}, "init_lora_weights"),
        ({"init_lora_weights": "gaussian"}, "init_lora_weights"),
        ({"init_lora_weights": 1}, "init_lora_weights"),
        ({"init_lora_weights": None}, "init_lora_weights"),
        ({"init_lora_weights": "pissa", "use_dora": True}, "init_lora_weights"),
        ({"type": "pissa", "use_dora": True}, "init_lora_weights"),
        ({"type": "ia3", "r": 8}, "r"),
        ({"type": "ia3", "target_modules": ".*"}, "target_modules"),
        ({"type": "ia3", "target_modules": []}, "target_modules"),
        ({"type": "ia3", "feedforward_modules": ["(a+)+"]}, "feedforward_modules"),
    ],
)
def test_what_means_nothing_is_refused_by_key(settings: dict[str, object], where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_peft(settings)
    assert caught.value.where == where


@pytest.mark.parametrize(("name", "rate"), [("dora", 2e-4), ("rslora", 2e-4), ("pissa", 2e-4), ("ia3", 1e-2)])
def test_each_has_its_default_learning_rate(name: str, rate: float) -> None:
    assert Job(name="a", datasets=["d.jsonl"], peft=name).learning_rate == rate


# What they cost


def linear(name: str, role: str, inputs: int, outputs: int) -> Place:
    return Place(f"layers.0.{name}", "linear", frozenset({role}), 0, inputs, outputs)


LAYER = [
    linear("q", "q", 16, 32),
    linear("k", "k", 16, 8),
    linear("v", "v", 16, 8),
    linear("up", "mlp_in", 16, 40),
    linear("down", "mlp_out", 40, 16),
    Place("layers.0.norm", "norm", frozenset({"norm"}), 0, 16, 16),
]


@pytest.mark.parametrize(
    ("spec", "outputs", "inputs"),
    [
        (IA3(), ["k", "v"], ["down"]),
        (IA3(feedforward_modules=()), ["k", "v", "down"], []),
        (IA3(target_modules=("q", "down")), ["q"], ["down"]),
        (IA3(target_modules=("q", "up", "down"), feedforward_modules=("up",)), ["q", "down"], ["up"]),
        (IA3(target_modules="all-linear"), ["q", "k", "v", "up"], ["down"]),
    ],
)
def test_what_ia3_scales(spec: IA3, outputs: list[str], inputs: list[str]) -> None:
    scaled = spec.scaled(LAYER)
    assert [place.name for place in scaled.outputs] == [f"layers.0.{name}" for name in outputs]
    assert [place.name for place in scaled.inputs] == [f"layers.0.{name}" for name in inputs]
    assert spec.unmatched(LAYER) == ()


def test_ia3_names_what_it_does_not_find() -> None:
    assert IA3(target_modules=("q", "query")).unmatched(LAYER) == ("query",)
    assert IA3(feedforward_modules=("up",)).unmatched(LAYER) == ("up",)  # there, but not scaled
    roleless = [place._replace(roles=frozenset()) for place in LAYER]
    assert IA3().parameters(roleless) == 0


SPECS = [
    Lora(r=3),
    Lora(r=3, use_rslora=True),
    Lora(r=4, use_dora=True),
    Lora(r=4, use_dora=True, lora_dropout=0.25),
    Lora(r=2, init_lora_weights="pissa"),
    IA3(),
    IA3(target_modules="all-linear"),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("arch", ["llama", "gpt2", "opt", "qwen2"])
def test_costs_are_those_of_what_is_built(arch: str, spec: PeftBase) -> None:
    backbone = backbone_of(arch)
    adapter = build_adapter(spec, backbone, seed=1, dtype=torch.float32, device=CPU)
    views = adapter.parameters.views
    assert adapter.parameters.count == spec.parameters(backbone.places) > 0
    norms = 2 * sum(view.numel() for name, view in views.items() if name.endswith("magnitude_vector"))
    fixed = norms + sum(tensor.numel() for tensor in adapter.fixed.values())
    assert spec.state_bytes(backbone.places) == 16 * adapter.parameters.count + 4 * fixed


@pytest.mark.parametrize("spec", [spec for spec in SPECS if isinstance(spec, Lora)], ids=str)
def test_products_are_those_that_are_computed(spec: Lora) -> None:
    """Counted by torch at one linear, there and back, less the linear's own two; in the twin, whose are all countable."""
    rows, op = 64, FrozenLinear("op", 32, 48, dtype=torch.float32)
    view = _OneLinear(op)
    adapter = build_adapter(spec, view, seed=1, dtype=torch.float32, device=CPU)
    keys = row_keys(1, 0, np.zeros(rows, np.int64), np.arange(rows), CPU) if spec.lora_dropout else None
    x = torch.randn(rows, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        hooks([Dispatch(0, rows, adapter, keys)], plain=True)["op"](op, x).sum().backward()
    own = counter.get_total_flops() - 2 * 2 * rows * 32 * 48
    assert own == rows * spec.flops_per_token([Place("op", "linear", frozenset(), 0, 32, 48)])


class _OneLinear:
    def __init__(self, op: FrozenLinear) -> None:
        self.ops, self.module_names = {op.name: op}, [op.name]
