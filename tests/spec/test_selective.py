"""Specs of bottleneck adapters, BitFit, norm tuning and SHiRA: what they accept, and what they cost."""

from __future__ import annotations

import pytest

from muxtune.errors import ConfigError
from muxtune.spec import BitFit, Bottleneck, LnTuning, Place, Shira
from muxtune.spec.peft import PeftBase, peft_family, read_peft

ATTENTION, OUT = frozenset({"o"}), frozenset({"mlp_out"})
PLACES = [
    Place("layers.0.o", "linear", ATTENTION, 0, 64, 48),
    Place("layers.0.down", "linear", OUT, 0, 80, 48, biased=True),
    Place("layers.0.mlp", "mlp", frozenset({"mlp"}), 0, 48, 48),
    Place("layers.0.ln", "norm", frozenset({"norm"}), 0, 48, 48, biased=True),
    Place("norm", "norm", frozenset({"norm"}), None, 48, 48),
]


@pytest.mark.parametrize("placement", ["houlsby", "pfeiffer", "parallel"])
def test_a_placement_is_a_short_name(placement: str) -> None:
    spec = read_peft(placement.upper())
    assert spec == Bottleneck(placement=placement) == read_peft({"type": "bottleneck", "placement": placement})
    assert read_peft({"type": placement, "placement": placement}) == spec
    assert peft_family(placement) == "bottleneck"
    other = "pfeiffer" if placement != "pfeiffer" else "parallel"
    with pytest.raises(ConfigError, match="contradicts") as caught:
        read_peft({"type": placement, "placement": other})
    assert caught.value.where == "placement"


def test_costs_of_a_bottleneck() -> None:
    serial = Bottleneck(placement="houlsby", bottleneck_size=5)
    assert serial.parameters(PLACES) == 2 * (2 * 5 * 48 + 5 + 48)
    assert serial.flops_per_token(PLACES) == 2 * 6 * (2 * 5 * 48)
    assert Bottleneck(bottleneck_size=5).parameters(PLACES) == 2 * 5 * 48 + 5 + 48
    assert Bottleneck(placement="parallel", bottleneck_size=5).parameters(PLACES) == 2 * 5 * 48 + 5 + 48
    assert [Bottleneck(reduction_factor=factor).size(48) for factor in (1, 3.5, 16, 60000)] == [48, 13, 3, 1]
    assert Bottleneck(reduction_factor=2, bottleneck_size=7).size(48) == 7
    no_mlp = [place for place in PLACES if place.kind != "mlp"]
    assert Bottleneck(placement="parallel").unmatched(no_mlp) == ("an operator of role mlp (parallel)",)
    assert serial.unmatched(no_mlp) == ()


def test_costs_of_the_selective() -> None:
    assert BitFit().parameters(PLACES) == 3 * 48
    assert BitFit(norm_biases=False).parameters(PLACES) == 2 * 48
    assert BitFit(target_modules="down").parameters(iter(PLACES)) == 2 * 48
    assert LnTuning().parameters(PLACES) == 3 * 48
    assert LnTuning(target_modules="norm").parameters(PLACES) == 48
    assert LnTuning(target_modules=["ln", "o"]).unmatched(PLACES) == ("o",)
    shira = Shira(r=2)
    assert shira.parameters(PLACES) == 2 * (64 + 48) + 2 * (80 + 48)
    assert shira.flops_per_token(PLACES) == 4 * shira.parameters(PLACES) + 2 * 48 * (64 + 80)
    assert shira.state_bytes(PLACES) == 32 * shira.parameters(PLACES)
    with pytest.raises(ConfigError, match="asks for 3,136 places of a weight that has 3,072") as caught:
        Shira(r=28).parameters(PLACES)
    assert caught.value.hint == "for this weight r can be 27 at most"


@pytest.mark.parametrize(
    ("spec", "key", "value"),
    [
        (Bottleneck, "placement", "beside"),
        (Bottleneck, "non_linearity", "sigmoid"),
        (Bottleneck, "reduction_factor", 0.5),
        (Bottleneck, "bottleneck_size", 0),
        (Bottleneck, "scaling", 0),
        (BitFit, "target_modules", "all-norms,.*"),
        (BitFit, "norm_biases", "perhaps"),
        (LnTuning, "target_modules", [".*norm"]),
        (Shira, "r", 0),
        (Shira, "r", 1.5),
    ],
)
def test_values_that_are_none_are_refused_by_key(spec: type[PeftBase], key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        spec(**{key: value})
    assert caught.value.where == key


def test_text_is_read_as_what_the_key_wants_and_comes_back_the_same() -> None:
    texts = {"reduction_factor": "8", "scaling": "5e-1", "non_linearity": "SiLU", "bottleneck_size": "12"}
    spec = Bottleneck(**texts)
    assert spec == Bottleneck(reduction_factor=8, scaling=0.5, non_linearity="swish", bottleneck_size=12)
    for made in (
        spec,
        BitFit(norm_biases="no"),
        LnTuning(target_modules="all"),
        LnTuning(target_modules="norm"),
        Shira(),
    ):
        assert read_peft(made.model_dump(mode="json")) == made
