"""The composed backbone against the untouched model it was made of, and its linears against their own modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from muxtune.errors import ModelError
from muxtune.models import attention
from muxtune.models.attach import LinearOp, Pass, PassSlot
from muxtune.models.attention import AttentionContext, Segment
from muxtune.models.backbone import Backbone
from muxtune.models.recipes import RECIPES, guess
from tests.exact import exact_fp64
from tests.tiny import SUPPORTED, tiny_model
from tests.tiny_tokenizer import VOCAB

LENGTHS = (17, 4, 30, 1, 12)  # past the sliding window, and 64 rows in all


@pytest.fixture(autouse=True)
def _registered() -> None:
    attention.register()


def _sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]


def _packed(sequences: list[Tensor], hooks: dict[str, object] | None = None) -> tuple[Tensor, Tensor, Pass]:
    lengths = [len(ids) for ids in sequences]
    current = Pass(AttentionContext([Segment(n) for n in lengths]), hooks or {})
    return torch.cat(sequences), torch.cat([torch.arange(n) for n in lengths]), current


@pytest.mark.parametrize("arch", SUPPORTED)
def test_packed_sequences_get_the_logits_of_the_models_own_forward_pass(arch: str) -> None:
    model = tiny_model(arch, dtype=torch.float64)
    with exact_fp64(), torch.no_grad():
        expected = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in _sequences()]
        backbone = Backbone(model)
        logits = backbone.head.logits(backbone.hidden(*_packed(_sequences())))
    for own, reference in zip(logits.split(LENGTHS), expected, strict=True):
        assert torch.allclose(own, reference, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("arch", SUPPORTED)
def test_its_attach_points_are_the_linears_of_its_layers_by_their_full_names(arch: str) -> None:
    model = tiny_model(arch)
    linears = {name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")}
    backbone = Backbone(model)
    outside = {name for name in linears if name.split(".")[-1] in ("lm_head", "project_in", "project_out")}
    assert set(backbone.attach_points) == linears - outside
    for name, op in backbone.attach_points.items():
        module = model.get_submodule(name)
        assert op.name == name and op.weight.data_ptr() == module.weight.data_ptr()


@pytest.mark.parametrize("arch", sorted(set(SUPPORTED)))
def test_a_recipes_roles_are_linears_of_every_layer(arch: str) -> None:
    backbone = Backbone(tiny_model(arch))
    recipe = backbone.recipe
    roles = {path for role in "qkvo" for path in getattr(recipe, role)} | {*recipe.mlp_in, *recipe.mlp_out}
    below = {name.split(f"{recipe.layers}.", 1)[1].partition(".")[2] for name in backbone.attach_points}
    assert roles == below, "a linear without a role, or a role without a linear"


def test_the_names_and_bytes_of_the_model_stay() -> None:
    model = tiny_model("gpt2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    backbone = Backbone(model)
    backbone.hidden(*_packed(_sequences()))
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert not any(parameter.requires_grad for parameter in model.parameters()) and not model.training


def test_the_model_itself_no_longer_runs_silently_without_its_layers() -> None:
    model = tiny_model("llama")
    Backbone(model)
    with pytest.raises(AssertionError, match="runs through the Backbone only"):
        model(input_ids=torch.tensor([[1, 2, 3]]))


def test_a_pass_that_raises_leaves_no_pass_behind() -> None:
    backbone = Backbone(tiny_model("llama"))

    def fails(op: LinearOp, x_TI: Tensor) -> Tensor:
        raise MemoryError("no room")

    name = next(iter(backbone.products))
    with pytest.raises(MemoryError):
        backbone.hidden(*_packed(_sequences(), {name: fails}))
    assert backbone.slot.current is None
    first = backbone.hidden(*_packed(_sequences()))
    assert torch.equal(first, backbone.hidden(*_packed(_sequences())))


def test_nothing_is_kept_of_a_pass() -> None:
    """The rows that `begin` records are the pass's own: the backbone holds no tensor of them afterwards."""
    backbone = Backbone(tiny_model("opt-350m"))
    backbone.hidden(*_packed(_sequences()))
    held = [stand_in.__dict__ for module in backbone.model.modules() if (stand_in := module.__dict__.get("forward"))]
    assert not backbone._notes and all(not state.get("_notes") for state in held)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt2", "opt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_linear_has_the_same_bits_hooked_and_not(arch: str, dtype: torch.dtype) -> None:
    """Whether a co-runner hooks a linear may not change its kernel: forward, and the gradient of its input."""
    backbone = Backbone(tiny_model(arch, dtype=dtype))
    for op in backbone.attach_points.values():
        module = backbone.model.get_submodule(op.name)
        x = torch.randn(1, 48, op.in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
        grad = torch.randn(1, 48, op.out_features, generator=torch.Generator().manual_seed(2)).to(dtype)
        unhooked = x.clone().requires_grad_()
        output = module(unhooked)
        output.backward(grad)
        assert torch.equal(output[0], op.forward(x[0]))
        assert torch.equal(unhooked.grad[0], op.input_gradient(grad[0]))
        reference = torch.nn.functional.linear(x, op.weight.T if op.transposed else op.weight, op.bias)
        assert torch.allclose(output, reference, rtol=1e-5, atol=1e-5)


def test_a_hook_gets_the_rows_and_answers_the_output() -> None:
    slot, module = PassSlot(), nn.Linear(6, 4)
    op = LinearOp("some.linear", module, slot, roles=frozenset(), layer=0)
    seen: list[Tensor] = []

    def hook(base: LinearOp, x_TI: Tensor) -> Tensor:
        seen.append(x_TI)
        return base.forward(x_TI) + 1

    x = torch.randn(2, 5, 6)
    slot.current = Pass(AttentionContext([Segment(10)]), {"some.linear": hook})
    hooked = op(x)
    slot.current = Pass(AttentionContext([Segment(10)]), {"another": hook})
    assert torch.allclose(hooked, op(x) + 1) and hooked.shape == (2, 5, 4)
    assert [rows.shape for rows in seen] == [(10, 6)]


def test_a_family_without_a_recipe_is_found_by_common_names() -> None:
    model = tiny_model("mistral")
    found = guess(model, "unheard-of")
    known = RECIPES["mistral"]
    assert (found.body, found.layers, found.norm, found.q) == (known.body, known.layers, known.norm, ())


def test_a_model_without_decoder_layers_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="unheard-of") as refused:
        guess(nn.Sequential(nn.Linear(3, 3)), "unheard-of")
    assert "llama" in str(refused.value)
