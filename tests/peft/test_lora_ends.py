"""LoRA's module at the token embedding: its hand-made gradient, the order of its sums, its start values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from muxtune.peft import lora_ends
from muxtune.peft.lora import LoraAdapter
from tests.engine.build import CPU, backbone_of

R, V, E, SCALE = 3, 40, 16, 0.7


def _ids(count: int, entries: int = V) -> Tensor:
    return torch.randint(0, entries, (count,), generator=torch.Generator().manual_seed(count))


def _module(dtype: torch.dtype, padding: int | None) -> lora_ends.LoraEmbeddingModule:
    generator = torch.Generator().manual_seed(1)
    leaves = []
    for shape in ((V, R), (R, E)):  # as they lie: both transposed
        leaf = torch.randn(shape, generator=generator).to(dtype).T.requires_grad_()
        leaf.grad = torch.zeros(shape, dtype=dtype).T
        leaves.append(leaf)
    return lora_ends.LoraEmbeddingModule(leaves[0], leaves[1], SCALE, padding)


@pytest.mark.parametrize("padding", [None, 5])
def test_pair_and_plain_agree(padding: int | None) -> None:
    ids_t = _ids(90)
    assert 5 in ids_t
    grad_tE, base_tE = (torch.randn(90, E, dtype=torch.float64) for _ in range(2))
    fast, plain = _module(torch.float64, padding), _module(torch.float64, padding)
    rows_tE = base_tE.clone()
    kept = fast.forward_rows(ids_t, rows_tE, None)
    assert fast.backward_output(ids_t, kept, grad_tE, None) == ()
    twin_tE = plain.forward_plain(ids_t, base_tE, None)
    twin_tE.backward(grad_tE)
    torch.testing.assert_close(rows_tE, twin_tE.detach(), rtol=1e-13, atol=1e-13)
    for one, other in zip(fast.parameters, plain.parameters, strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    a_RV = fast.parameters[0]
    assert a_RV.grad is not None and bool(a_RV.grad[:, 5].any()) is (padding is None)


def test_on_a_bf16_backbone_it_computes_in_fp32() -> None:
    module, ids_t = _module(torch.float32, None), _ids(20)
    base_tE = torch.randn(20, E).bfloat16()
    rows_tE = base_tE.clone()
    kept = module.forward_rows(ids_t, rows_tE, None)
    assert rows_tE.dtype == torch.bfloat16 and kept[0].dtype == torch.float32
    a_RV, b_ER = (leaf.detach() for leaf in module.parameters)
    torch.testing.assert_close(rows_tE, (base_tE + SCALE * a_RV.T[ids_t] @ b_ER.T).bfloat16(), rtol=1e-2, atol=1e-2)
    module.backward_output(ids_t, kept, rows_tE, None)
    assert all(leaf.grad is not None and bool(leaf.grad.any()) for leaf in module.parameters)


@pytest.mark.parametrize("count", [1, 7, 300, 5000])
@pytest.mark.parametrize("entries", [3, 500])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_summed_one_after_another_in_their_order(count: int, entries: int, threads: int) -> None:
    """So neither the cut of a batch nor its repetition changes a bit."""
    index_t, rows_tR = _ids(count, entries), torch.randn(count, 8, generator=torch.Generator().manual_seed(2))
    start_VR = torch.randn(entries, 8, generator=torch.Generator().manual_seed(3))
    expected, at_once, in_parts = start_VR.clone(), start_VR.clone(), start_VR.clone()
    for index, row_R in zip(index_t.tolist(), rows_tR, strict=True):
        expected[index] += row_R
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        lora_ends._add_rows(at_once, index_t, rows_tR)
        for part, rows in zip(index_t.split(11), rows_tR.split(11), strict=True):
            lora_ends._add_rows(in_parts, part, rows)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(at_once, expected) and torch.equal(in_parts, expected)


def test_it_starts_as_peft_does_from_its_seed_and_name_alone() -> None:
    """A zero and B standard normal; the head as any linear. What else the adapter is on changes nothing."""
    backbone = backbone_of("llama")
    embedding, head = backbone.ends.values()
    linear = next(iter(backbone.attach_points.values()))

    def state(ops: list[object], seed: int = 7) -> dict[str, Tensor]:
        settings = {"scale": 1.0, "dropout": 0.0, "dtype": torch.float32, "device": CPU}
        return LoraAdapter(ops, r=64, seed=seed, **settings).state()  # type: ignore[arg-type]

    alone, among = state([embedding]), state([embedding, linear, head])
    assert all(torch.equal(value, among[name]) for name, value in alone.items())
    a_RV, b_ER = alone.values()
    assert a_RV.shape == (64, 320) and not a_RV.any() and b_ER.shape == (48, 64)
    assert abs(float(b_ER.std()) - 1) < 0.05 and abs(float(b_ER.mean())) < 0.05
    assert bool(among["lm_head.lora_A"].any()) and not among["lm_head.lora_B"].any()
    assert not torch.equal(b_ER, state([embedding], seed=8)[f"{embedding.name}.lora_embedding_B"])
