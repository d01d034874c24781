"""Dropout masks: a pure function of (seed, step, example, position, attach point, channel), and a fair one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from muxtune.peft.dropout import RowKeys, keep_mask, row_keys

CPU = torch.device("cpu")
POINT = "model.layers.0.self_attn.q_proj"


def _keys(seed: int = 1, step: int = 0, example: int = 0, positions: int = 64) -> RowKeys:
    return row_keys(seed, step, np.full(positions, example), np.arange(positions), CPU)


def _mask(keys: RowKeys, point: str = POINT, channels: int = 256, rate: float = 0.5) -> torch.Tensor:
    return keep_mask(keys, point, channels, rate)


def _correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten().double(), other.flatten().double()]))[0, 1])


def test_the_same_arguments_give_the_same_bits_whatever_torchs_generator_says() -> None:
    torch.manual_seed(1)
    first = _mask(_keys())
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(first, _mask(_keys()))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_known_answer() -> None:
    """Masks are part of what a resumed task continues: they may not change between versions."""
    kept = _mask(_keys(seed=7, step=3, example=11, positions=2), channels=16, rate=0.5).int().tolist()
    assert kept == [
        [1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 1],
        [1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize(
    "other",
    [_keys(seed=2), _keys(seed=2**63 - 1), _keys(step=1), _keys(example=1), _keys(example=2**40)],
    ids=["seed", "large seed", "step", "example", "large example"],
)
def test_every_argument_gives_an_independent_mask(other: RowKeys) -> None:
    assert abs(_correlation(_mask(_keys()), _mask(other))) < 0.03


def test_attach_points_positions_and_channels_are_independent_too() -> None:
    keys = _keys()
    mask = _mask(keys)
    assert abs(_correlation(mask, _mask(keys, POINT.replace("q_proj", "k_proj")))) < 0.03
    assert abs(_correlation(mask[:-1], mask[1:])) < 0.03
    assert abs(_correlation(mask[:, :-1], mask[:, 1:])) < 0.03
    assert abs(_correlation(mask[:, :128], mask[:, 128:])) < 0.03


def test_rows_may_come_in_any_order_and_company() -> None:
    """The mask of a row is the row's own: any split of a batch asks for the same bits."""
    whole = row_keys(5, 2, np.repeat([4, 9], [10, 6]), np.concatenate([np.arange(10), np.arange(6)]), CPU)
    part = row_keys(5, 2, np.array([9, 9, 4]), np.array([5, 0, 7]), CPU)
    assert torch.equal(_mask(whole)[[15, 10, 7]], _mask(part))


def test_a_channels_bit_does_not_depend_on_how_many_there_are() -> None:
    assert torch.equal(_mask(_keys(), channels=256)[:, :100], _mask(_keys(), channels=100))


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.1, 0.5, 0.9, 0.999])
def test_the_share_kept_is_the_share_asked_for(rate: float) -> None:
    mask = _mask(_keys(positions=512), channels=1024, rate=rate).double()
    spread = (rate * (1 - rate) / mask.numel()) ** 0.5
    assert abs(float(mask.mean()) - (1 - rate)) <= 5 * spread
    # every row and every channel alone is fair, too
    for along in (0, 1):
        means, count = mask.mean(dim=along), mask.shape[along]
        assert float((means - (1 - rate)).abs().max()) <= 6 * (rate * (1 - rate) / count) ** 0.5 + 1e-12


def test_a_higher_rate_drops_what_a_lower_one_drops_and_more() -> None:
    low, high = _mask(_keys(), rate=0.2), _mask(_keys(), rate=0.6)
    assert not (high & ~low).any() and bool((low & ~high).any())
