"""The cache against a list that is simply concatenated."""

from __future__ import annotations

import torch
from torch import Tensor

from muxtune.models.kv_cache import KVCache

G, K = 2, 4


def _some(tokens: int, seed: int) -> Tensor:
    return torch.randn(1, G, tokens, K, generator=torch.Generator().manual_seed(seed))


def test_what_comes_back_is_all_that_went_in() -> None:
    """Over several growths, for slots and layers that are fed in turn."""
    cache = KVCache()
    held: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
    for number, size in enumerate([3, 60, 1, 1, 70, 200, 1]):
        for place in ((0, 0), (0, 5), (1, 5)):
            keys, values = _some(size, number), _some(size, number + 100 * place[0])
            known = held.setdefault(place, ([], []))
            known[0].append(keys)
            known[1].append(values)
            own_keys, own_values = cache.extend(*place, keys, values)
            assert torch.equal(own_keys, torch.cat(known[0], dim=2))
            assert torch.equal(own_values, torch.cat(known[1], dim=2))


def test_a_sequence_of_n_tokens_is_copied_as_a_whole_log_n_times() -> None:
    cache = KVCache()
    places = {cache.extend(0, 0, _some(1, n), _some(1, n))[0].data_ptr() for n in range(1000)}
    assert len(places) <= 5  # 64, 128, 256, 512, 1024


def test_a_slot_that_is_dropped_starts_anew_and_others_stay() -> None:
    cache = KVCache()
    for slot in (0, 1):
        for layer in (0, 1):
            cache.extend(layer, slot, _some(5, slot), _some(5, slot))
    cache.drop(0)
    assert cache.slots == {1}
    fresh, _ = cache.extend(0, 0, _some(2, 9), _some(2, 9))
    assert torch.equal(fresh, _some(2, 9))
    kept, _ = cache.extend(1, 1, _some(1, 3), _some(1, 3))
    assert torch.equal(kept, torch.cat([_some(5, 1), _some(1, 3)], dim=2))
    cache.drop(8)  # a slot that never was
