"""What the probe at load refuses - models that would train silently wrong - and what it finds of the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from muxtune.errors import ModelError
from muxtune.models import attention, probe
from muxtune.models.backbone import Backbone
from muxtune.models.probe import check_support, model_logits, rows_invariant
from tests.tiny import SUPPORTED, tiny_config, tiny_model
from tests.tiny_tokenizer import VOCAB


@pytest.fixture(autouse=True)
def _registered() -> None:
    attention.register()


def _check(model: PreTrainedModel, spoil: Callable[[PreTrainedModel], None] = lambda model: None) -> None:
    """As loading does it; `spoil` changes the composed model after the untouched one has answered."""
    expected = model_logits(model, VOCAB)
    backbone = Backbone(model, "transformers")
    spoil(model)
    check_support(backbone, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("arch", SUPPORTED)
def test_supported_families_pass_in_every_precision(arch: str, dtype: torch.dtype) -> None:
    model = tiny_model(arch, dtype=dtype)
    own = model.config._attn_implementation
    model_logits(model, VOCAB)
    assert model.config._attn_implementation == own, "asking the model changes it"
    _check(model)


def test_bloom_whose_position_bias_never_reaches_the_interface_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'bloom'.*attention interface"):
        _check(tiny_model("bloom"))


def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give the class of one layer's attention another forward, as a family with code of its own would have."""
    module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})


def test_a_layer_that_ignores_our_attention_is_refused() -> None:
    def own_attention(self: nn.Module, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.o_proj(self.q_proj(hidden_states)), None

    with pytest.raises(ModelError, match="do not call the attention interface once each"):
        _check(tiny_model("llama"), lambda model: _forward_of(model.model.layers[1].self_attn, own_attention))


def test_a_layer_that_attends_twice_is_refused() -> None:
    def twice(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        type(self).__mro__[1].forward(self, *arguments, **keywords)
        return type(self).__mro__[1].forward(self, *arguments, **keywords)

    with pytest.raises(ModelError, match="once each"):
        _check(tiny_model("llama"), lambda model: _forward_of(model.model.layers[0].self_attn, twice))


def test_a_layer_that_mixes_the_sequences_of_a_pack_is_refused() -> None:
    """Anything that looks along the rows but for attention: here a token shift, as some families have."""

    def shifted(self: nn.Module, x: Tensor) -> Tensor:
        return type(self).__mro__[1].forward(self, x + 0.5 * x.roll(1, dims=1))

    model = tiny_model("llama")
    _forward_of(model.model.layers[0].mlp, shifted)
    with pytest.raises(ModelError, match="mixes sequences"):
        _check(model)


def test_a_model_whose_parts_are_not_where_the_recipe_says_is_refused() -> None:
    """Here a scale after the layers that no recipe names: the composition leaves it out."""
    model = tiny_model("llama")
    head = model.lm_head
    scaled = nn.Linear(head.in_features, head.out_features, bias=False)
    scaled.weight = head.weight
    scaled.forward = lambda x: nn.functional.linear(x, head.weight) * 1.5  # type: ignore[method-assign]
    model.lm_head = scaled
    with pytest.raises(ModelError, match="does not reproduce"):
        _check(model)


def test_logits_that_are_not_finite_are_refused() -> None:
    def spoil(model: PreTrainedModel) -> None:
        with torch.no_grad():
            model.model.norm.weight[3] = float("nan")

    with pytest.raises(ModelError, match="differ by nan"):
        _check(tiny_model("llama"), spoil)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("arch", SUPPORTED)
def test_rows_are_invariant_on_this_machine(arch: str, dtype: torch.dtype) -> None:
    assert rows_invariant(Backbone(tiny_model(arch, dtype=dtype)))


@pytest.mark.parametrize("width", [53, 84])
def test_rows_that_do_not_begin_at_a_cache_line_are_found_out(width: int) -> None:
    """A task's slice of rows is then aligned one way alone and another way beside others."""
    config = tiny_config("llama")
    config.intermediate_size = width
    model = AutoModelForCausalLM.from_config(config)
    assert not rows_invariant(Backbone(model))


def test_a_product_whose_rows_depend_on_the_batch_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for another machine's GEMM: from 128 rows on it sums the inner dimension in another order."""
    backbone = Backbone(tiny_model("llama"))
    plain = Tensor.__matmul__

    def by_size(rows: Tensor, factor: Tensor) -> Tensor:
        if rows.shape[0] < 128:
            return plain(rows, factor)
        half = rows.shape[1] // 2
        return plain(rows[:, :half], factor[:half]) + plain(rows[:, half:], factor[half:])

    monkeypatch.setattr(Tensor, "__matmul__", by_size)
    assert not probe.rows_invariant(backbone)
