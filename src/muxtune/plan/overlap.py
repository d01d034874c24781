"""The order inside a stage: subgraphs of several hTasks, so that one's collective runs while another computes.

A tensor-parallel layer is two subgraphs, each followed by an all-reduce: [norm, qkv, attention, o_proj] | [norm, MLP],
the other way round on the way back. Passes of a slot are chains of such subgraphs; a chain's next subgraph waits for
its last collective, another chain's does not. Whenever the stage's compute or its link is free, it takes of what is
ready the one with most to come behind it in its chain, compute and collectives together, and among equals the first
chain: list scheduling by critical path (Graham 1966) with Jackson's priority (1955), which leaves out the operation's
own time. That was closer to the least than counting it, the other order, the longest collective or the shortest
operation first.

How good: finding the shortest order is NP-hard (a job shop of two machines that chains visit again and again). At any
time before the end compute or link is busy, if all passes are there from the start; so the schedule takes at most the
sum of all work, which is at most twice the least there is. Against the best order of small cases it is 4 % longer on
average, and never more than half (tests/plan/test_overlap.py). No order changes a bit of what is computed.

The boundary: seconds in, seconds out. Cost: n log k for n subgraphs of k chains.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

ATTENTION_SHARE = 1 / 3  # of a layer's time; by weights it is 1/4 (Llama with grouped heads) to 1/3 (without)


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Seconds of its operators, and of the collective that follows: 0 where there is none."""

    compute_s: float
    collective_s: float = 0.0


Chain = tuple[Subgraph, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """When subgraph `place` of a chain computes, and when its collective runs."""

    chain: int
    place: int
    start_s: float
    end_s: float
    collective_start_s: float
    collective_end_s: float


def forward_chain(layers: int, layer_s: float, collective_s: float, *, entry_s: float = 0, exit_s: float = 0) -> Chain:
    """The way of a pass forward through a stage. `entry_s` precedes its first subgraph, `exit_s` is one of its own."""
    attention = layer_s * ATTENTION_SHARE
    mlp = layer_s - attention
    first = Subgraph(entry_s + attention, collective_s)
    layer = (Subgraph(attention, collective_s), Subgraph(mlp, collective_s))
    chain = (first, *(layer * layers)[1:])
    return (*chain, Subgraph(exit_s)) if exit_s else chain


def backward_chain(layers: int, layer_s: float, collective_s: float) -> Chain:
    """The way back."""
    attention = layer_s * ATTENTION_SHARE
    mlp = layer_s - attention
    return (Subgraph(mlp, collective_s), Subgraph(attention, collective_s)) * layers


def list_schedule(
    chains: Sequence[Chain],
    release_s: Sequence[float] = (),
    *,
    compute_free_s: float = 0.0,
    link_free_s: float = 0.0,
) -> tuple[Launch, ...]:
    """When everything runs, in the order in which subgraphs are launched.

    Args:
        release_s: when each chain may begin; 0 where nothing is said.
        compute_free_s, link_free_s: when what ran before is off the stage's two resources.
    """
    behind = [_behind(chain) for chain in chains]
    place = [0] * len(chains)
    computed: list[tuple[float, float]] = [(0.0, 0.0)] * len(chains)
    compute, link = _Resource(compute_free_s), _Resource(link_free_s)
    for chain in range(len(chains)):
        compute.offer(release_s[chain] if release_s else 0.0, chain, behind[chain][0])
    launches: list[Launch] = []
    while compute.waiting or link.waiting:
        # Whatever starts first is settled first; at one time compute is, since a collective may follow at once.
        if compute.next_start_s <= link.next_start_s:
            chain = compute.take()
            subgraph = chains[chain][place[chain]]
            computed[chain] = compute.run(subgraph.compute_s)
            if subgraph.collective_s > 0:
                link.offer(compute.free_s, chain, behind[chain][place[chain]] - subgraph.collective_s)
                continue
            collective = (compute.free_s, compute.free_s)
        else:
            chain = link.take()
            collective = link.run(chains[chain][place[chain]].collective_s)
        launches.append(Launch(chain, place[chain], *computed[chain], *collective))
        place[chain] += 1
        if place[chain] < len(chains[chain]):
            compute.offer(collective[1], chain, behind[chain][place[chain]])
    return tuple(sorted(launches, key=lambda launch: (launch.start_s, launch.end_s)))


def _behind(chain: Chain) -> list[float]:
    """Seconds from the end of each subgraph's compute to the end of the chain, if nothing is in its way."""
    behind, tail = [], 0.0
    for subgraph in reversed(chain):
        behind.append(tail + subgraph.collective_s)
        tail = behind[-1] + subgraph.compute_s
    return behind[::-1]


@dataclass(slots=True)
class _Resource:
    """One thing at a time: what is ready waits by what is to come behind it, what is not by when it will be."""

    free_s: float
    ready: list[tuple[float, int]] = field(default_factory=list)
    coming: list[tuple[float, float, int]] = field(default_factory=list)

    @property
    def waiting(self) -> bool:
        return bool(self.ready or self.coming)

    @property
    def next_start_s(self) -> float:
        if self.ready:
            return self.free_s
        return max(self.free_s, self.coming[0][0]) if self.coming else float("inf")

    def offer(self, at_s: float, chain: int, behind_s: float) -> None:
        heapq.heappush(self.coming, (at_s, -behind_s, chain))

    def take(self) -> int:
        """The chain to run next; the resource is as far as its start."""
        self.free_s = self.next_start_s
        while self.coming and self.coming[0][0] <= self.free_s:
            _, priority, chain = heapq.heappop(self.coming)
            heapq.heappush(self.ready, (priority, chain))
        return heapq.heappop(self.ready)[1]

    def run(self, seconds: float) -> tuple[float, float]:
        """Begin and end."""
        start = self.free_s
        self.free_s = start + seconds
        return start, self.free_s
