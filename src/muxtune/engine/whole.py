"""All of what a task has learnt, wherever its parts are: what checkpoints and adapter folders are made of.

On one device a task's adapter and moments are all there is (`OwnWhole`). Where a backbone is split over ranks, each
rank holds parts of them, and whoever wants the whole asks all ranks together (`ShardedParts`; `muxtune.engine.ranks`
has how they are asked). A checkpoint has the same files with the same numbers in the same places either way, so it
does not tell, and need not, how many ranks there were.

Cost, over ranks: one exchange for each tensor; the whole adapter in memory while it lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from muxtune.engine.optim import FlatAdamW
from muxtune.parallel.mesh import TensorAxis
from muxtune.peft.base import Adapter, BackboneView
from muxtune.peft.registry import build_adapter
from muxtune.spec.job import JobSpec

MOMENTS = ("exp_avg", "exp_avg_sq")
Tensors = Mapping[str, Tensor]


class Whole(Protocol):
    """A task's adapter and moments, all of them."""

    def finite(self) -> bool:
        """Whether every trainable number still is."""
        ...

    def template(self) -> Adapter:
        """An adapter with the names and shapes of the whole, and any values."""
        ...

    def adapter(self) -> Adapter:
        """One with the values that there are now; whoever asks does not change it."""
        ...

    def state(self) -> dict[str, Tensor]:
        """See `Adapter.state`."""
        ...

    def moments(self) -> dict[str, Tensor]:
        """See `FlatAdamW.moments`: flat, in the order of the whole adapter's parameters."""
        ...

    def load(self, state: Tensors, moments: Tensors, step: int) -> None:
        """Take over what the two above gave after `step` optimizer steps."""
        ...


class OwnWhole:
    """Of a task that is all here."""

    def __init__(self, adapter: Adapter, optimizer: FlatAdamW) -> None:
        self._adapter = adapter
        self._optimizer = optimizer

    def finite(self) -> bool:
        return bool(self._adapter.parameters.values.isfinite().all())

    def template(self) -> Adapter:
        return self._adapter

    def adapter(self) -> Adapter:
        return self._adapter

    def state(self) -> dict[str, Tensor]:
        return self._adapter.state()

    def moments(self) -> dict[str, Tensor]:
        return self._optimizer.moments()

    def load(self, state: Tensors, moments: Tensors, step: int) -> None:
        self._adapter.load(state)
        self._optimizer.load_moments(dict(moments), step)


class HeldAdapter(Protocol):
    """A rank's part of an adapter (`muxtune.parallel.adapters.ShardedAdapter`), and how it and the whole come of each
    other. All ranks ask together."""

    @property
    def adapter(self) -> Adapter: ...
    @property
    def axis(self) -> TensorAxis:
        """All ranks."""
        ...

    def whole_state(self) -> dict[str, Tensor]: ...
    def whole(self, values: Tensors) -> dict[str, Tensor]: ...
    def own(self, values: Tensors) -> dict[str, Tensor]: ...
    def load_whole(self, state: Tensors) -> None: ...


class ShardedParts:
    """What one rank has of a task, and its part in putting the whole together: all ranks do the same at once.

    `moments_by_name` and `load` know the moments as `MOMENT/PARAMETER`, of the whole's shapes.
    """

    def __init__(self, held: HeldAdapter, optimizer: FlatAdamW) -> None:
        self._held = held
        self._optimizer = optimizer

    def finite(self) -> bool:
        broken = self._held.adapter.parameters.values.isfinite().all().logical_not()
        return not bool(self._held.axis.max_(broken.reshape(1).float()))

    def state(self) -> dict[str, Tensor]:
        return self._held.whole_state()

    def moments_by_name(self) -> dict[str, Tensor]:
        """After a first step; a rank that has nothing of the adapter has no moments, and asks all the same."""
        parameters, own = self._held.adapter.parameters, self._optimizer.moments()
        found: dict[str, Tensor] = {}
        for moment in MOMENTS:
            buffer = own[moment].to(parameters.values) if moment in own else torch.zeros_like(parameters.values)
            whole = self._held.whole(parameters.named(buffer))
            found |= {f"{moment}/{name}": value for name, value in whole.items()}
        return found

    def load(self, state: Tensors, moments: Tensors, step: int) -> None:
        """Take this rank's part."""
        self._held.load_whole(state)
        if step == 0:
            return
        parameters = self._held.adapter.parameters
        found: dict[str, Tensor] = {}
        for moment in MOMENTS:
            found[moment] = torch.zeros_like(parameters.values)
            own = self._held.own({name: moments[f"{moment}/{name}"] for name in parameters.views})
            for name, view in parameters.named(found[moment]).items():
                view.copy_(own[name])
        self._optimizer.load_moments(found, step)


Asked = Callable[[str], dict[str, Tensor]]
Told = Callable[[Tensors, Tensors, int], None]


class ShardedWhole:
    """Of a task whose parts are on many ranks, seen from the one that writes it down.

    Args:
        view: the whole model, without memory.
        dtype: its precision.
        asked: has all ranks put `state`, `moments` or `finite` together.
        told: has all ranks take their parts of a state and of moments by name.
        steps: optimizer steps done, now.
    """

    def __init__(
        self,
        job: JobSpec,
        view: BackboneView,
        dtype: torch.dtype,
        *,
        asked: Asked,
        told: Told,
        steps: Callable[[], int],
    ) -> None:
        self._job = job
        self._view = view
        self._dtype = dtype
        self._steps = steps
        self._asked = asked
        self._told = told

    def finite(self) -> bool:
        return bool(self._asked("finite")["finite"])

    def template(self) -> Adapter:
        """Made anew each time: nobody needs it between checkpoints."""
        cpu, job = torch.device("cpu"), self._job
        return build_adapter(job.peft, self._view, seed=job.seed, dtype=self._dtype, device=cpu)

    def adapter(self) -> Adapter:
        made = self.template()
        made.load(self.state())
        return made

    def state(self) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in self._asked("state").items()}

    def moments(self) -> dict[str, Tensor]:
        """Flat, as the whole adapter's optimizer would have them."""
        if not self._steps():
            return {}
        found = self._asked("moments")
        parameters = self.template().parameters
        flat = {moment: torch.zeros_like(parameters.values) for moment in MOMENTS}
        for moment, buffer in flat.items():
            for name, view in parameters.named(buffer).items():
                view.copy_(found[f"{moment}/{name}"])
        return flat

    def load(self, state: Tensors, moments: Tensors, step: int) -> None:
        """Sends the whole to all ranks."""
        parameters = self.template().parameters
        by_name = {
            f"{moment}/{name}": view
            for moment, flat in moments.items()
            for name, view in parameters.named(flat).items()
        }
        self._told(state, by_name, step)


def parts_answer(parts: ShardedParts, what: str) -> dict[str, Tensor]:
    """What a rank does, and has afterwards, when all are asked for `what`."""
    if what == "finite":
        return {"finite": torch.tensor(parts.finite())}
    return parts.state() if what == "state" else parts.moments_by_name()
