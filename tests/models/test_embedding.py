"""Rows of the embedding that a pass gives: in place of looked-up ones, with a gradient, and to their own rows only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from muxtune.models import attention
from muxtune.models.attach import GivenRows, Pass
from muxtune.models.attention import AttentionContext, Segment
from muxtune.models.backbone import Backbone
from tests.exact import exact_fp64
from tests.tiny import SUPPORTED, tiny_model
from tests.tiny_tokenizer import VOCAB

LENGTHS = (9, 4, 12, 7)  # the second and the third begin with three given rows


def _pass(given: tuple[GivenRows, ...]) -> tuple[Tensor, Tensor, Pass]:
    ids_T = torch.randint(VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    positions_T = torch.cat([torch.arange(n) for n in LENGTHS])
    return ids_T, positions_T, Pass(AttentionContext([Segment(n) for n in LENGTHS]), given=given)


def _rows(backbone: Backbone) -> Tensor:
    width = backbone.embedding.width
    return torch.randn(3, width, generator=torch.Generator().manual_seed(5), dtype=backbone.dtype).requires_grad_()


@pytest.fixture(autouse=True)
def _registered() -> None:
    attention.register()


@pytest.mark.parametrize("arch", SUPPORTED)
def test_given_rows_are_the_models_own_input_embeddings(arch: str) -> None:
    """Against `inputs_embeds` of the untouched model, with the gradient that comes back."""
    model = tiny_model(arch, dtype=torch.float64)
    backbone = Backbone(tiny_model(arch, dtype=torch.float64))
    rows_VE = _rows(backbone)
    ids_T, positions_T, current = _pass((GivenRows(9, rows_VE), GivenRows(13, rows_VE)))
    with exact_fp64():
        hidden_TD = backbone.hidden(ids_T, positions_T, current)
        logits = backbone.head.logits(hidden_TD).split(LENGTHS)
        twin_VE = rows_VE.detach().clone().requires_grad_()
        embedded = [model.get_input_embeddings()(ids) for ids in ids_T.split(LENGTHS)]
        for place in (1, 2):
            embedded[place] = torch.cat([twin_VE, embedded[place][3:]])
        expected = [model(inputs_embeds=rows[None], use_cache=False).logits[0] for rows in embedded]
        for own, reference in zip(logits, expected, strict=True):
            assert torch.allclose(own, reference, rtol=1e-10, atol=1e-11)
        torch.cat(list(logits)).square().sum().backward()
        torch.cat(expected).square().sum().backward()
    assert torch.allclose(rows_VE.grad, twin_VE.grad, rtol=1e-9, atol=1e-11)


def test_rows_that_are_looked_up_keep_their_bits_and_need_no_gradient() -> None:
    backbone = Backbone(tiny_model("llama"))
    rows_VE = _rows(backbone)
    ids_T, positions_T, bare = _pass(())
    looked_up = backbone.begin(ids_T, positions_T, bare).x_TD
    _, _, current = _pass((GivenRows(9, rows_VE),))
    given = backbone.begin(ids_T, positions_T, current).x_TD
    assert given.requires_grad and not looked_up.requires_grad
    assert torch.equal(given[:9], looked_up[:9]) and torch.equal(given[12:], looked_up[12:])
    assert torch.equal(given[9:12], rows_VE)
    with torch.no_grad():
        assert not backbone.begin(ids_T, positions_T, current).x_TD.requires_grad
    assert not backbone.embedding.served, "nothing of a task is kept"


def test_rows_that_overlap_are_an_error() -> None:
    backbone = Backbone(tiny_model("llama"))
    rows_VE = _rows(backbone)
    for starts in ((3, 5), (9, 3)):
        with pytest.raises(AssertionError, match="given rows"):
            backbone.begin(*_pass(tuple(GivenRows(start, rows_VE) for start in starts)))


def test_a_model_that_does_not_use_its_embedding_is_an_error() -> None:
    """Silence would train nothing."""
    model = tiny_model("llama")
    backbone = Backbone(model)
    embedding = model.get_input_embeddings()
    embedding.__dict__["forward"] = lambda ids: type(embedding).forward(embedding, ids)
    with pytest.raises(AssertionError, match="does not use its embedding"):
        backbone.begin(*_pass((GivenRows(3, _rows(backbone)),)))


@pytest.mark.parametrize("arch", SUPPORTED)
def test_its_place_says_its_size(arch: str) -> None:
    model = tiny_model(arch)
    backbone = Backbone(model)
    place, *points, head = backbone.places
    weight = model.get_input_embeddings().weight
    assert (place.kind, place.inputs, place.outputs) == ("embedding", *weight.shape)
    assert model.get_submodule(place.name).weight is weight
    assert [point.name for point in points] == list(backbone.ops)
    weight = model.get_output_embeddings().weight
    assert (head.kind, head.inputs, head.outputs) == ("head", *weight.shape[::-1])
    assert model.get_submodule(head.name).weight is weight and list(backbone.ends) == [place.name, head.name]
    heads, key_value_heads, width = backbone.attention_shape
    shapes = {name: op.out_features for name, op in backbone.attach_points.items()}
    for name, op in backbone.attach_points.items():
        if op.roles == {"k"}:
            assert shapes[name] == key_value_heads * width
        if op.roles == {"q"}:
            assert shapes[name] == heads * width
