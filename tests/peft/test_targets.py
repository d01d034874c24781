"""target_modules: the same linears that peft picks for literal names, and an error where a name matches none."""

from __future__ import annotations

import pytest
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from muxtune.errors import AdapterError
from muxtune.peft.targets import select
from tests.tiny import tiny_model

NAMES = [
    f"model.layers.{layer}.{part}"
    for layer in range(12)
    for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
]
OPS = dict.fromkeys(NAMES, 0)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", NAMES),
        (["q_proj", "up_proj"], [name for name in NAMES if name.endswith(("q_proj", "up_proj"))]),
        (["up_proj", "q_proj"], [name for name in NAMES if name.endswith(("q_proj", "up_proj"))]),
        ("v_proj", [name for name in NAMES if name.endswith("v_proj")]),
        (["layers.1.self_attn.q_proj"], ["model.layers.1.self_attn.q_proj"]),
        (["model.layers.3.mlp.up_proj", "q_proj"], [n for n in NAMES if n.endswith("q_proj") or n == NAMES[14]]),
    ],
)
def test_names_are_whole_or_suffixes_at_a_dot(targets: list[str] | str, expected: list[str]) -> None:
    assert list(select(targets, OPS)) == expected


@pytest.mark.parametrize("target", ["proj", "_proj", "q_pro", "layers", ".*", "*.q_proj", "Q_PROJ", "roj", ""])
def test_nothing_is_a_pattern_and_a_name_that_matches_nothing_is_an_error(target: str) -> None:
    with pytest.raises(AdapterError) as refused:
        select(["q_proj", target], OPS)
    assert repr(target) in refused.value.message and "'q_proj'" not in refused.value.message
    assert "down_proj, q_proj, up_proj, v_proj, or 'all-linear'" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("arch", "targets"),
    [
        ("llama", "all-linear"),
        ("llama", ["q_proj", "down_proj"]),
        ("llama", ["layers.1.mlp.up_proj"]),
        ("gpt2", "all-linear"),
        ("gpt2", ["c_proj"]),
        ("opt", "all-linear"),
        ("opt", ["fc1", "out_proj"]),
    ],
)
def test_peft_picks_the_same(arch: str, targets: list[str] | str) -> None:
    model = tiny_model(arch)
    linears = {name: 0 for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")}
    del linears["lm_head"]
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, fan_in_fan_out=arch == "gpt2")
    tuned = get_peft_model(model, config).base_model.model
    theirs = {name for name, module in tuned.named_modules() if isinstance(module, LoraLayer)}
    assert set(select(targets, linears)) == theirs
