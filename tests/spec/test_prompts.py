"""The specs of prefix and prompt tuning: what they accept, and what they cost from attach points alone."""

from __future__ import annotations

import pytest

from muxtune.errors import ConfigError
from muxtune.spec import JobSpec, Place, PrefixTuning, PromptTuning
from muxtune.spec.peft import read_peft


def _linear(name: str, roles: str, layer: int, inputs: int, outputs: int) -> Place:
    return Place(f"layers.{layer}.{name}", "linear", frozenset(roles.split()), layer, inputs, outputs)


EMBEDDING = Place("embed", "embedding", frozenset({"embed"}), None, 320, 24)
# Two layers of 4 heads of 16 on 2 key/value heads; and the same without groups, fused.
GROUPED = [
    EMBEDDING,
    *(
        _linear(f"{role}_proj", role, layer, 48, outputs)
        for layer in range(2)
        for role, outputs in {"q": 64, "k": 32, "v": 32, "mlp_in": 80}.items()
    ),
]
FUSED = [EMBEDDING, *(_linear("qkv", "q k v", layer, 48, 144) for layer in range(2))]


def test_costs_from_attach_points_alone() -> None:
    prefix, prompt = PrefixTuning(num_virtual_tokens=5), PromptTuning(num_virtual_tokens=5)
    assert prefix.parameters(GROUPED) == 5 * 2 * 2 * 32
    assert prefix.parameters(FUSED) == 5 * 2 * 2 * 48
    assert prompt.parameters(GROUPED) == prompt.parameters(FUSED) == 5 * 24
    for spec in (prefix, prompt):
        assert spec.state_bytes(GROUPED) == 16 * spec.parameters(GROUPED)
        assert spec.flops_per_token(GROUPED) == 12 * 5 * 2 * 64
        assert spec.flops_per_token(FUSED) == 12 * 5 * 2 * 48
        assert spec.unmatched(GROUPED) == ()
    assert (prefix.prefix_length, prefix.virtual_rows, prefix.lead) == (5, 0, 5)
    assert (prompt.prefix_length, prompt.virtual_rows, prompt.lead) == (0, 5, 5)
    assert prefix.parameters([EMBEDDING]) == 0, "a family without roles"


def test_each_trains_with_its_defaults_alone_at_a_rate_of_its_own() -> None:
    assert (PrefixTuning().num_virtual_tokens, PromptTuning().num_virtual_tokens) == (20, 20)
    for name, spec in (("prefix_tuning", PrefixTuning()), ("Prompt_Tuning", PromptTuning())):
        assert read_peft(name) == read_peft({"type": name}) == spec
        job = JobSpec(name="a", datasets=["x.jsonl"], peft={"type": name})
        assert job.peft == spec and job.learning_rate == type(spec).default_learning_rate
        assert JobSpec.model_validate(job.model_dump(mode="json")) == job


@pytest.mark.parametrize("value", [0, -1, 2.5, "many", True, 10**9])
def test_the_number_of_virtual_tokens_is_a_count(value: object) -> None:
    for kind in (PrefixTuning, PromptTuning):
        with pytest.raises(ConfigError) as caught:
            kind(num_virtual_tokens=value)  # type: ignore[arg-type]
        assert caught.value.where == "num_virtual_tokens"


def test_what_peft_has_and_this_has_not_is_refused_by_name() -> None:
    assert read_peft({"type": "prefix_tuning", "prefix_projection": "no"}) == PrefixTuning()
    assert read_peft({"type": "prompt_tuning", "prompt_tuning_init": "random"}) == PromptTuning()
    for keys, message in (
        ({"type": "prefix_tuning", "prefix_projection": True}, "is not supported"),
        ({"type": "prompt_tuning", "prompt_tuning_init": "TEXT"}, "is not supported yet"),
        ({"type": "prompt_tuning", "prompt_tuning_init": "sample_vocab"}, "is not supported yet"),
        ({"type": "prompt_tuning", "prompt_tuning_init": "zeros"}, "should be RANDOM"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            read_peft(keys)
        assert caught.value.where in ("prefix_projection", "prompt_tuning_init")
    with pytest.raises(ConfigError):
        read_peft({"type": "prompt_tuning", "prompt_tuning_init_text": "Answer in SQL"})
    with pytest.raises(ConfigError):
        read_peft({"type": "prefix_tuning", "target_modules": "all-linear"})
