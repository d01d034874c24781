"""Counting what a model runs, by its modules and by the products that read its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Calls:
    """Counts, by name, what each module that holds weights of its own ran, and the shapes it made.

    Two ways at once, because a module may be called as a module (seen by a hook; adapters then take part) or have its
    class's forward called (seen by wrapping that): it must come to one in all.
    """

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hooked: Counter[str] = Counter()
        self.by_class: Counter[str] = Counter()
        self.shapes: set[tuple[int, ...]] = set()
        self.names = {module: name for name, module in model.named_modules() if list(module.parameters(recurse=False))}
        for kind in {type(module) for module in self.names}:
            monkeypatch.setattr(kind, "forward", self._counted(kind, kind.forward))
        for module in self.names:
            module.register_forward_hook(self._note)

    def _counted(self, kind: type[nn.Module], forward: Callable[..., Any]) -> Callable[..., Any]:
        def counted(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
            if module in self.names and type(module) is kind:  # not again where it calls its base class, or by a twin
                self.by_class[self.names[module]] += 1
            return forward(module, *arguments, **keywords)

        return counted

    def _note(self, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        self.hooked[self.names[module]] += 1
        self.shapes.add(tuple(output.shape))


class Products(TorchDispatchMode):
    """Counts, by frozen weight, the matrix products that read it; notes the shape of all that is no view of one."""

    def __init__(self, weights: Mapping[str, torch.Tensor], model: nn.Module) -> None:
        super().__init__()
        self.frozen = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.named = {weight.untyped_storage().data_ptr(): name for name, weight in weights.items()}
        self.reads: Counter[str] = Counter()
        self.rows: dict[str, int] = {}
        self.made: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in args if isinstance(value, torch.Tensor) and value.layout is torch.strided]
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            for value in tensors:
                name = self.named.get(value.untyped_storage().data_ptr())
                if name is not None and value.dim() == 2:
                    self.reads[name] += 1
                    self.rows[name] = result.shape[0]
        for value in result if isinstance(result, tuple | list) else (result,):
            plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
            if plain and value.untyped_storage().data_ptr() not in self.frozen:
                self.made.add(tuple(value.shape))
        return result
