"""What `check_gpu` checks of several devices: ranks against one device, NCCL's order of events, ragged attention.

Two ranks, one a GPU, train the steps of a load in each layout, collectives overlapped and not, and must come to the
losses of one device. What needs a second GPU is left out where there is one, and says so; on a CPU (gloo) the ranks run
all the same, so that this script is tested where there is no GPU.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.baselines import Recipe
from benchmarks.loads import non_uniform
from benchmarks.numerics import Check, Subject, run
from benchmarks.race import LOSS_TOLERANCE, loss_gap
from benchmarks.sides import engine_side
from muxtune.engine.load import load_held
from muxtune.models.attention import AttentionContext, Segment, packed_attention
from muxtune.models.backbone import Backbone
from muxtune.models.sources import resolve
from muxtune.parallel.layout import RankLayout
from muxtune.parallel.mesh import TensorAxis, join, leave
from muxtune.spec.policy import Policy

RANKS = 2
STEPS = 3
RECIPE = Recipe(learning_rate=2e-3)
TIMEOUT_S = 120.0
LAYOUTS = (RankLayout(tp=2), RankLayout(pp=2))
_LENGTHS = (7, 130, 61, 1, 33)
_HEADS, _GROUPS, _WIDTH = 6, 2, 64
Losses = list[float]


def rank_checks(subject: Subject) -> Iterator[Check]:
    """Every layout against one device, with and without overlap."""
    lacking = _lacking(subject.device)
    alone = None if lacking else _losses(subject.backbone())
    for layout in LAYOUTS:
        for overlap in (True, False):
            name = f"{layout}, {'overlapped' if overlap else 'plain'}, against one device"
            if alone is None:
                yield Check(name, None, lacking)
                continue
            found = _on_ranks(Asked(subject.folder.path, subject.device.type, subject.dtype, layout, overlap))
            gap, allowed = loss_gap([alone, found]), LOSS_TOLERANCE[subject.dtype]
            yield Check(name, gap <= allowed, f"losses {gap:.1e} apart, {allowed:.1e} allowed")


def nccl_order(device: torch.device) -> Check:
    """A sum takes what was enqueued before it, and what is enqueued after its wait sees the sum."""
    name = "NCCL's streams keep the order of events"
    if device.type != "cuda":
        return Check(name, None, "needs a GPU")
    with tempfile.TemporaryDirectory() as meeting:
        place = torch.device("cuda", device.index or 0)
        join(0, 1, meeting=f"file://{meeting}/meeting", timeout_s=TIMEOUT_S, device=place)
        try:
            total = _summed_late(place)
        finally:
            leave()
    return Check(name, total == 2.0, f"{total:g}, 2 expected")


def varlen(subject: Subject) -> Check:
    """Our attention a segment against PyTorch's kernel for ragged ones, which has no fp32 and no CPU."""
    name, device, dtype = "attention a segment against the varlen kernel", subject.device, subject.dtype
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return Check(name, None, "the kernel is for half precision on a GPU")
    from torch.nn.attention.varlen import varlen_attn

    generator = torch.Generator().manual_seed(0)
    rows = sum(_LENGTHS)

    def drawn(heads: int) -> Tensor:
        return torch.randn(rows, heads, _WIDTH, generator=generator).to(device, dtype)

    q_THK, k_TGK, v_TGK = drawn(_HEADS), drawn(_GROUPS), drawn(_GROUPS)
    bounds = torch.tensor([0, *_LENGTHS]).cumsum(0).to(device, torch.int32)
    longest, causal = max(_LENGTHS), (-1, 0)
    whole_THK = varlen_attn(q_THK, k_TGK, v_TGK, bounds, bounds, longest, longest, window_size=causal, enable_gqa=True)
    ours_THK = _by_segment(q_THK, k_TGK, v_TGK)
    gap = float((whole_THK.float() - ours_THK.float()).abs().max())
    return Check(name, gap <= 2e-2, f"{gap:.1e} apart, 2e-02 allowed")


def _by_segment(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
    context = AttentionContext([Segment(rows) for rows in _LENGTHS])
    layer = nn.Module()
    layer.__dict__.update(layer_idx=0, muxtune_slot=SimpleNamespace(current=SimpleNamespace(attention=context)))
    q_1HTK, k_1GTK, v_1GTK = (rows.transpose(0, 1)[None] for rows in (q_THK, k_TGK, v_TGK))
    mixed_1THK, _ = packed_attention(layer, q_1HTK, k_1GTK, v_1GTK, None)
    return mixed_1THK[0]


def _summed_late(device: torch.device) -> float:
    """An all-reduce of what a long product comes to, waited for on a stream that then adds one."""
    long = torch.ones(4096, 4096, device=device)
    value = torch.zeros(1, device=device)
    for _ in range(8):
        value = value * 0 + (long @ long)[0, :1] / 4096
    work = dist.all_reduce(value, async_op=True)
    assert work is not None
    work.wait()
    return float(value + 1)


def _lacking(device: torch.device) -> str:
    if device.type == "cpu":
        return ""
    return "" if torch.cuda.device_count() >= RANKS else f"needs {RANKS} GPUs, there is 1"


def _losses(backbone: Backbone, *, policy: Policy = "fuse-all", together: int = 1, overlap: bool = True) -> Losses:
    """Of every step, task by task."""
    load = non_uniform(STEPS, vocab=backbone.vocabulary, micro_batch=2)
    side = engine_side(backbone, load, RECIPE, policy=policy, together=together, overlap=overlap)
    run(side, range(STEPS))
    return [loss for losses in side.losses for loss in losses]


@dataclass(frozen=True, slots=True)
class Asked:
    """What ranks run."""

    folder: Path
    device: str
    dtype: torch.dtype
    layout: RankLayout
    overlap: bool

    def on(self, axis: TensorAxis, device: torch.device) -> Losses:
        """The same on all ranks."""
        folder = resolve(str(self.folder))
        held = load_held(folder, axis, self.layout, dtype=self.dtype, device=device, layers=None, timeout_s=TIMEOUT_S)
        return _losses(held, policy="sequential", together=RANKS, overlap=self.overlap)


def _on_ranks(asked: Asked) -> Losses:
    """The losses of the first rank, from processes of their own. Raises RuntimeError where one ends without any."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as meeting:
        ends = [context.Pipe(duplex=False) for _ in range(RANKS)]
        ranks = [
            context.Process(target=_serve, args=(rank, f"file://{meeting}/meeting", asked, theirs))
            for rank, (_, theirs) in enumerate(ends)
        ]
        for rank in ranks:
            rank.start()
        try:
            answers: list[Losses | str] = [_answer(ours, asked) for ours, _ in ends]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    if failed := [answer for answer in answers if isinstance(answer, str)]:
        raise RuntimeError("; ".join(failed))
    losses = answers[0]
    assert not isinstance(losses, str)
    return losses


def _answer(end: Connection, asked: Asked) -> Losses | str:
    if not end.poll(TIMEOUT_S):
        return f"a rank of {asked.layout} has not answered within {TIMEOUT_S:g} s"
    answer: Losses | str = end.recv()
    return answer


def _serve(rank: int, meeting: str, asked: Asked, answer: Connection) -> None:
    torch.set_num_threads(1)
    device = torch.device(asked.device, rank) if asked.device == "cuda" else torch.device("cpu")
    axis = join(rank, RANKS, meeting=meeting, timeout_s=TIMEOUT_S, device=device)
    try:
        answer.send(asked.on(axis, device))
    except Exception as error:
        answer.send(f"rank {rank} of {asked.layout}: {type(error).__name__}: {error}")
    finally:
        leave()
