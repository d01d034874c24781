"""The fast block against its twin: which models it takes, the same function of the same bytes, no memory of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from muxtune.errors import ModelError
from muxtune.models import attention
from muxtune.models.attach import Pass
from muxtune.models.attention import AttentionContext, Segment
from muxtune.models.backbone import Backbone
from muxtune.models.probe import check_support, model_logits, rows_invariant
from muxtune.models.weights import weights_hash
from tests.exact import exact_fp64
from tests.models.test_memory import kept_bytes
from tests.tiny import SUPPORTED, tiny_model
from tests.tiny_tokenizer import VOCAB

FAST = ("llama", "llama-tied", "llama-mqa", "qwen2", "qwen3", "mistral")
LENGTHS = (17, 4, 30, 1, 12)  # past the sliding window, and 64 rows in all
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.fixture(autouse=True)
def _registered() -> None:
    attention.register()


def _packed(hooks: dict[str, object] | None = None) -> tuple[Tensor, Tensor, Pass]:
    ids_T = torch.randint(VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    positions_T = torch.cat([torch.arange(n) for n in LENGTHS])
    return ids_T, positions_T, Pass(AttentionContext([Segment(n) for n in LENGTHS]), hooks or {})


@pytest.mark.parametrize("arch", SUPPORTED)
def test_it_takes_the_llama_shape_and_leaves_the_rest_to_the_general_block(arch: str) -> None:
    backbone = Backbone(tiny_model(arch))
    assert backbone.block == ("fast" if arch in FAST else "transformers")
    assert bool(backbone.groups) == (arch in FAST)
    assert Backbone(tiny_model(arch), "transformers").block == "transformers"


def test_it_is_refused_where_it_is_asked_for_and_does_not_know_the_model() -> None:
    with pytest.raises(ModelError, match=r"'gpt2'.*block: auto, or transformers"):
        Backbone(tiny_model("gpt2"), "fast")


def _with_bias(model: nn.Module) -> None:
    """k_proj alone has one."""
    linear = model.model.layers[1].self_attn.k_proj
    linear.bias = nn.Parameter(torch.ones(linear.out_features))


def _with_norm(model: nn.Module) -> None:
    model.model.layers[0].self_attn.q_norm = nn.LayerNorm(16)


def _with_activation(model: nn.Module) -> None:
    model.config.hidden_act = "gelu"
    for layer in model.model.layers:
        layer.mlp.act_fn = ACT2FN["gelu"]


def _with_own_code(model: nn.Module) -> None:
    module = model.model.layers[0].mlp
    module.__class__ = type("LlamaMLP", (type(module),), {"forward": lambda self, x: x})


@pytest.mark.parametrize("change", [_with_bias, _with_norm, _with_activation, _with_own_code])
def test_a_layer_with_a_part_that_it_does_not_know_is_not_run_by_it(change: object) -> None:
    model = tiny_model("llama")
    change(model)
    assert Backbone(model).block == "transformers"


@pytest.mark.parametrize("arch", FAST)
def test_the_logits_are_those_of_the_untouched_model(arch: str) -> None:
    model = tiny_model(arch, dtype=torch.float64)
    ids = _packed()[0].split(LENGTHS)
    with exact_fp64(), torch.no_grad():
        expected = [model(input_ids=one[None], use_cache=False).logits[0] for one in ids]
        backbone = Backbone(model, "fast")
        logits = backbone.head.logits(backbone.hidden(*_packed()))
    for own, reference in zip(logits.split(LENGTHS), expected, strict=True):
        assert torch.allclose(own, reference, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("arch", FAST)
def test_the_probe_at_load_holds_it_to_the_untouched_model(arch: str, dtype: torch.dtype) -> None:
    model = tiny_model(arch, dtype=dtype)
    expected = model_logits(model, VOCAB)
    backbone = Backbone(model, "fast")
    check_support(backbone, expected)
    assert dtype is torch.bfloat16 or rows_invariant(backbone)


@pytest.mark.parametrize("arch", FAST)
def test_names_bytes_and_hash_of_the_model_stay(arch: str) -> None:
    model = tiny_model(arch)
    before, hashed = {name: tensor.clone() for name, tensor in model.state_dict().items()}, weights_hash(model)
    backbone = Backbone(model, "fast")
    backbone.hidden(*_packed())
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert weights_hash(model) == hashed
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("arch", FAST)
def test_joined_weights_are_the_models_own_memory(arch: str) -> None:
    model = tiny_model(arch)
    bytes_before = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    backbone = Backbone(model, "fast")
    held = [parameter.data for parameter in model.parameters()]
    held += [op.weight_OI for op in backbone.products.values()]
    held += [group.bias for group in backbone.groups if group.bias is not None]
    held += [op.weight for op in backbone.attach_points.values()]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held}
    assert sum(storages.values()) == bytes_before
    for group in backbone.groups:
        assert torch.equal(group.weight_OI, torch.cat([model.get_submodule(m.name).weight for m in group.members]))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_group_has_the_same_bits_hooked_and_not(arch: str) -> None:
    """Forward, and the gradient of its input; the node of the hook is the adapters' affair."""
    backbone = Backbone(tiny_model(arch), "fast")
    for group in backbone.groups:
        x_TI = torch.randn(48, group.in_features, generator=torch.Generator().manual_seed(1)).requires_grad_()
        grad_TO = torch.randn(48, group.out_features, generator=torch.Generator().manual_seed(2))
        y_TO = group(x_TI)
        y_TO.backward(grad_TO)
        assert torch.equal(y_TO, group.forward(x_TI.detach()))
        assert x_TI.grad is not None and torch.equal(x_TI.grad, group.input_gradient(grad_TO))


@pytest.mark.parametrize("kind", ["norm", "mlp"])
def test_a_hook_that_changes_nothing_changes_no_bit(kind: str) -> None:
    backbone = Backbone(tiny_model("qwen3"), "fast")
    asked: list[str] = []

    def asking(op: object, x_TD: Tensor) -> Tensor:
        asked.append(op.name)
        return op.forward(x_TD)

    names = [op.name for op in backbone.ops.values() if op.kind == kind and op.layer is not None]
    hooked = backbone.hidden(*_packed(dict.fromkeys(names, asking)))
    assert asked == names and torch.equal(hooked, backbone.hidden(*_packed()))


def test_a_hook_that_would_not_be_asked_is_refused() -> None:
    backbone = Backbone(tiny_model("llama"), "fast")
    name = next(iter(backbone.attach_points))
    with pytest.raises(AssertionError, match="hooked by itself"):
        backbone.hidden(*_packed({name: lambda op, x: op.forward(x)}))


def test_a_pass_that_raises_leaves_no_pass_behind() -> None:
    backbone = Backbone(tiny_model("llama"), "fast")

    def fails(op: object, x_TD: Tensor) -> Tensor:
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        backbone.hidden(*_packed({backbone.groups[1].name: fails}))
    assert backbone.slot.current is None


@pytest.mark.parametrize("arch", FAST)
def test_it_keeps_less_of_a_pass_than_its_twin(arch: str) -> None:
    """With an adapter at every linear."""
    twin, fast = (kept_bytes(Backbone(tiny_model(arch), block)) for block in ("transformers", "fast"))
    assert fast < twin
