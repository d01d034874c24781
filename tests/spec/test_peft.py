"""LoRA's spec: what it accepts, and its costs against peft on a real model."""

from __future__ import annotations

import pytest

from muxtune.errors import AdapterError, ConfigError
from muxtune.spec import Lora, Place
from muxtune.spec.peft import PEFT_SPECS, PeftBase, peft_family, read_peft, type_name
from muxtune.spec.peft.targets import refuse_ends, refuse_unmatched


def linears(*shapes: tuple[int, int]) -> list[Place]:
    return [Place(f"layers.{i}.proj", "linear", frozenset(), i, *shape) for i, shape in enumerate(shapes)]


PLACES = [*linears((16, 16), (16, 8), (32, 16)), Place("norm", "norm", frozenset({"norm"}), None, 16, 16)]


def test_costs_from_attach_points_alone() -> None:
    lora = Lora(r=4)
    assert lora.parameters(PLACES) == 4 * (32 + 24 + 48)
    assert lora.flops_per_token(PLACES) == 6 * lora.parameters(PLACES)
    assert lora.state_bytes(PLACES) == 16 * lora.parameters(PLACES)
    assert (lora.virtual_rows, lora.prefix_length, lora.scaling) == (0, 0, 4.0)
    assert lora.parameters([]) == 0


ENDS = [
    Place("embed", "embedding", frozenset({"embed"}), None, 100, 12),
    *PLACES,
    Place("lm_head", "head", frozenset({"head"}), None, 16, 100),
]


def test_the_embedding_and_the_head_are_taken_by_name_only() -> None:
    assert Lora(r=4).parameters(ENDS) == Lora(r=4).parameters(PLACES)
    lora = Lora(r=4, target_modules=["embed", "lm_head", "layers.1.proj"])
    assert lora.parameters(ENDS) == 4 * (112 + 116 + 24)
    # a lookup has no product with the entries: forward, B's gradient, and that of the looked-up rows
    assert lora.flops_per_token(ENDS) == 2 * 4 * 3 * (12 + 116 + 24)
    assert lora.state_bytes(ENDS) == 16 * lora.parameters(ENDS)
    assert lora.unmatched(ENDS) == () and lora.unmatched(PLACES) == ("embed", "lm_head")
    refuse_ends(lora, ENDS)
    refuse_ends(Lora(use_rslora=True, target_modules=["lm_head"]), ENDS)


@pytest.mark.parametrize("name", ["dora", "pissa", "bitfit", "shira", "ln_tuning", "ia3"])
@pytest.mark.parametrize(("target", "what"), [("embed", "token embedding"), ("lm_head", "head")])
def test_other_types_have_no_place_there(name: str, target: str, what: str) -> None:
    spec = read_peft({"type": name, "target_modules": [target]})
    assert spec.unmatched(ENDS) == (target,)
    with pytest.raises(AdapterError, match=f"'{target}' is the base model's {what}, which {name} does not train"):
        refuse_ends(spec, ENDS)


def test_parameters_are_those_that_peft_makes() -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 24))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0", "1"]))
    trainable = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    assert Lora(r=4).parameters(linears((16, 8), (8, 24))) == trainable


def test_target_modules_are_literal_names() -> None:
    assert Lora(target_modules="all").target_modules == "all-linear"
    assert Lora(target_modules="q_proj, v_proj").target_modules == ("q_proj", "v_proj")
    assert Lora(target_modules=["layers.0.q_proj", "layers.0.q_proj"]).target_modules == ("layers.0.q_proj",)
    for value in (".*", ["q_proj|v_proj"], "(a+)+", [], "", ["q", ""], [3], 5, "a..b", "q" * 300):
        with pytest.raises(ConfigError) as caught:
            Lora(target_modules=value)  # type: ignore[arg-type]
        assert caught.value.where == "target_modules"


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *((name, name) for name in ("lora", "ia3", "prefix_tuning", "prompt_tuning", "bottleneck", "bitfit")),
        *((name, name) for name in ("ln_tuning", "shira")),
        *((name, "lora") for name in ("dora", "rslora", "pissa", "DoRA")),
        *((name, "bottleneck") for name in ("houlsby", "pfeiffer", "parallel")),
    ],
)
def test_every_name_of_the_contract_is_a_type_with_defaults(name: str, family: str) -> None:
    spec = read_peft(name)
    assert isinstance(spec, PEFT_SPECS[family]) and spec.type == family == peft_family(name)
    assert 1e-5 < spec.default_learning_rate < 0.1
    assert read_peft(spec.model_dump(mode="json")) == spec == read_peft({"type": name})
    with pytest.raises(ConfigError, match="unknown key"):
        read_peft({"type": name, "surprise": 1})


def test_a_misspelt_type_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'lora'"):
        read_peft("lroa")


def test_kin_of_lora_by_its_keys() -> None:
    plain_kin = {"use_dora": False, "use_rslora": "false", "init_lora_weights": True}
    assert read_peft(plain_kin) == Lora()
    for key, value, name in [("use_dora", True, "dora"), ("use_rslora", "yes", "rslora")]:
        assert read_peft({key: value}) == read_peft(name) == read_peft({"type": name, key: value}) != Lora()
        with pytest.raises(ConfigError, match=f"contradicts type {name}") as caught:
            read_peft({"type": name, key: "no"})
        assert caught.value.where == key
    assert read_peft({"init_lora_weights": "pissa"}) == read_peft("pissa") != Lora()


def test_families() -> None:
    assert [peft_family(name) for name in ("dora", "LoRA", "houlsby", "ia3")] == ["lora", "lora", "bottleneck", "ia3"]


@pytest.mark.parametrize("name", ["lora", "dora", "rslora", "pissa", "houlsby", "pfeiffer", "parallel", "ia3", "shira"])
def test_a_spec_is_called_what_it_was_asked_for_as(name: str) -> None:
    assert type_name(read_peft(name)) == name  # type: ignore[arg-type]


def test_two_short_names_at_once() -> None:
    assert type_name(Lora(use_dora=True, use_rslora=True)) == "dora+rslora"


BLOCK = [
    Place("embed_tokens", "embedding", frozenset({"embed"}), None, 100, 12),
    *(Place(f"h.0.{name}_proj", "linear", frozenset({name}), 0, 16, 16) for name in ("q", "k", "down")),
    Place("h.0.norm", "norm", frozenset({"norm"}), 0, 16, 16),
    Place("lm_head", "head", frozenset({"head"}), None, 16, 100),
]


@pytest.mark.parametrize(
    ("spec", "key", "unknown", "hint"),
    [
        (
            {"target_modules": ["q_prj", "k_proj"]},
            "target_modules",
            "'q_prj'",
            "did you mean 'q_proj'? it has: down_proj, embed_tokens, k_proj, lm_head, q_proj, or 'all-linear'",
        ),
        (
            {"type": "shira", "target_modules": ["h.7.q_proj"]},
            "target_modules",
            "'h.7.q_proj'",
            "did you mean 'q_proj'? it has: down_proj, k_proj, q_proj, or 'all-linear'",
        ),
        ({"type": "ln_tuning", "target_modules": ["xyz"]}, "target_modules", "'xyz'", "it has: norm, or 'all-norms'"),
        (
            {"type": "ia3", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["dwn_proj"]},
            "feedforward_modules",
            "'dwn_proj'",
            "did you mean 'down_proj'? it has: down_proj, k_proj",
        ),
        ({"type": "houlsby"}, "type", "an operator of role o", "choose another type of adapter"),
    ],
)
def test_a_target_that_names_nothing_is_refused_with_what_there_is(
    spec: dict[str, object], key: str, unknown: str, hint: str
) -> None:
    made = read_peft(spec)
    assert isinstance(made, PeftBase)
    with pytest.raises(AdapterError) as caught:
        refuse_unmatched(made, BLOCK)
    assert unknown in caught.value.message
    assert (caught.value.where, caught.value.hint) == (key, hint)


def test_targets_that_are_there_are_not_refused() -> None:
    for targets in ("all-linear", ["q_proj", "lm_head"], ["h.0.k_proj"]):
        refuse_unmatched(Lora(target_modules=targets), BLOCK)
