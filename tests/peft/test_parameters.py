"""One flat buffer, many views: writing through either is writing the same numbers."""

from __future__ import annotations

import mmap
import resource
import sys

import psutil
import pytest
import torch

from muxtune.peft.parameters import FlatParameters

SHAPES = {"a": (3, 5), "b": (7, 2), "c": (16,), "d": (1, 1)}


def _parameters(dtype: torch.dtype = torch.float32) -> FlatParameters:
    return FlatParameters(SHAPES, dtype, torch.device("cpu"), columns_first={"b"})


def test_views_have_their_shapes_and_share_the_buffer() -> None:
    parameters = _parameters()
    assert {name: tuple(view.shape) for name, view in parameters.views.items()} == SHAPES
    assert parameters.count == 15 + 14 + 16 + 1
    for number, view in enumerate(parameters.views.values(), start=1):
        with torch.no_grad():
            view.fill_(number)
    assert float(parameters.values.sum()) == 15 * 1 + 14 * 2 + 16 * 3 + 1 * 4
    parameters.values.mul_(2)
    assert [float(view.detach().flatten()[0]) for view in parameters.views.values()] == [2, 4, 6, 8]


def test_views_start_at_multiples_of_16_elements() -> None:
    parameters = _parameters()
    base = parameters.values.data_ptr()
    for view in parameters.views.values():
        for tensor, start in ((view, base), (view.grad, parameters.gradient.data_ptr())):
            assert tensor is not None and (tensor.data_ptr() - start) % (16 * 4) == 0


def test_gradients_lie_where_the_optimizer_reads() -> None:
    """Autograd's own accumulation and a hand-written one end in the same buffer, whichever way a matrix lies."""
    parameters = _parameters(torch.float64)
    views = parameters.views
    (views["a"].sum() * 2 + (views["b"] * torch.arange(14.0).view(7, 2)).sum()).backward()
    assert views["b"].grad is not None
    assert torch.equal(views["b"].grad, torch.arange(14.0, dtype=torch.float64).view(7, 2))
    views["b"].grad.add_(1)
    assert float(parameters.gradient.sum()) == 15 * 2 + sum(range(14)) + 14
    parameters.zero_gradient()
    assert not views["a"].grad.any() and not views["b"].grad.any()
    views["c"].sum().backward()
    assert float(parameters.gradient.sum()) == 16, "the view and the buffer came apart"


def test_a_matrix_may_lie_in_the_buffer_transposed() -> None:
    parameters = _parameters()
    assert parameters.views["b"].stride() == (1, 7) and parameters.views["b"].T.is_contiguous()
    assert parameters.views["a"].is_contiguous()


def test_exported_values_go_in_again_by_name() -> None:
    parameters, other = _parameters(), _parameters()
    parameters.values.normal_()
    exported = parameters.export()
    other.load(exported)
    for name, view in other.views.items():
        assert torch.equal(view, parameters.views[name])
    exported["a"].fill_(9)
    assert not torch.equal(parameters.views["a"], exported["a"]), "an export is a copy"


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_values_of_another_adapter_do_not_go_in(change: str) -> None:
    parameters = _parameters()
    tensors = parameters.export()
    if change == "missing":
        del tensors["a"]
    elif change == "extra":
        tensors["e"] = torch.zeros(1)
    else:
        tensors["a"] = torch.zeros(5, 3)
    with pytest.raises(AssertionError):
        parameters.load(tensors)


def test_the_memory_it_says_is_values_gradient_and_two_moments() -> None:
    parameters = _parameters()
    assert parameters.state_bytes == 4 * 4 * (16 + 16 + 16 + 16)


def test_large_buffers_lie_at_pages_and_take_memory_when_they_are_written() -> None:
    resident = psutil.Process().memory_info
    before = resident().rss
    parameters = FlatParameters({"w": (1000, 10_000)}, torch.float32, torch.device("cpu"))
    assert parameters.values.data_ptr() % mmap.PAGESIZE == parameters.gradient.data_ptr() % mmap.PAGESIZE == 0
    assert resident().rss - before < 10_000_000
    assert not parameters.gradient.any() and not parameters.values.any()
    parameters.gradient.fill_(1)
    assert resident().rss - before > 38_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the data segment is Linux's")
def test_no_memory_for_them_is_said_as_such() -> None:
    """So that whoever asks whether an error is of memory (`muxtune.engine.failure`) knows it."""
    held = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (psutil.Process().memory_info().vms, held[1]))
    try:
        with pytest.raises(MemoryError, match="bytes"):
            FlatParameters({"w": (1 << 40,)}, torch.float32, torch.device("cpu"))
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, held)


def test_what_is_kept_is_the_same_leaves_in_a_smaller_buffer() -> None:
    parameters = _parameters()
    for number, view in enumerate(parameters.views.values(), start=1):
        with torch.no_grad():
            view.copy_(number * torch.arange(view.numel()).view(view.shape))
    before, leaves = parameters.export(), dict(parameters.views)
    held = parameters.views
    parameters.keep({"b", "d"})
    assert held is parameters.views and set(held) == {"b", "d"}
    assert parameters.values.numel() == parameters.gradient.numel() == 32
    for name, view in parameters.views.items():
        assert view is leaves[name] and torch.equal(view, before[name])
        assert view.grad is not None and not view.grad.any()
        view.grad += 3
    assert float(parameters.gradient.sum()) == 3 * (14 + 1)
    parameters.values.zero_()
    assert not any(view.any() for view in parameters.views.values())
    parameters.keep(())
    assert parameters.values.numel() == 0 and not parameters.views
