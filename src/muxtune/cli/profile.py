"""`muxtune profile`: what each operator of a base model takes on this machine, measured once and kept."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from muxtune.cli.terminal import console, counted, duration, grid

if TYPE_CHECKING:
    from muxtune.engine.profile_cache import KeptTable
    from muxtune.plan.profile import Directions, OperatorTable


class Block(StrEnum):
    AUTO = "auto"
    FAST = "fast"
    TRANSFORMERS = "transformers"


class DType(StrEnum):
    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP64 = "fp64"


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="An alias, a folder, a .gguf file or a hub name.", show_default=False)
]
_TOKENS = 64  # rows at which adapters are told


def profile(
    model: Model,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[DType, typer.Option("--dtype", help="Of the weights.")] = DType.AUTO,
    block: Annotated[Block, typer.Option("--block", help="What runs a layer.")] = Block.AUTO,
    threads: Annotated[int | None, typer.Option("--threads", help="Of the CPU.")] = None,
    num_hidden_layers: Annotated[
        int | None, typer.Option("--num-hidden-layers", min=1, metavar="N", help="The first layers only.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure, whatever is kept.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The table as JSON.")] = False,
) -> None:
    """Show what layers, attention, head, adapters and optimizer take here: measured when first asked for, then kept."""
    import torch

    from muxtune.engine.arguments import as_device, as_threads
    from muxtune.engine.load import load_backbone
    from muxtune.engine.profile_cache import kept_table
    from muxtune.models.cache import default_cache_dir
    from muxtune.models.sources import resolve

    device = as_device(device, "--device")
    if threads is not None:
        torch.set_num_threads(as_threads(threads, "--threads"))
    folder = resolve(model)
    backbone = load_backbone(
        folder, device=device, dtype=dtype.value, num_hidden_layers=num_hidden_layers, block=block.value
    )
    kept = kept_table(
        backbone,
        default_cache_dir(),
        fresh=fresh,
        model=folder.public_name,
        notice=lambda text: print(text, file=sys.stderr) if text else None,
    )
    weights = sum(op.in_features * op.out_features for op in backbone.attach_points.values() if op.layer == 0)
    if as_json:
        print(kept.table.to_json())
        return
    _show(kept, weights)


def _show(kept: KeptTable, weights: int) -> None:
    table = kept.table
    layers, threads = counted(table.layers, "layer"), counted(table.threads, "thread")
    print(f"{table.model}: {layers}, {table.dtype}, {table.device}, {threads}")
    print(f"{_age(kept)}, {'kept in' if kept.kept else 'but could not be kept in'} {kept.path}")
    if table.busy:
        print(
            f"the machine was busy: others used {table.others:.0%} of the processors, repeats differed by "
            f"{table.spread:.0%}; --fresh measures again, once it is quiet"
        )
    print()
    _show_layers(table, weights)
    _show_counts("attention of a sequence in one layer: positions", table.attention)
    _show_counts("head: trained rows", table.head)
    _show_adapters(table)
    print(f"\na pass costs {1e3 * table.entry.seconds[0]:.2f} ms beside its layers and its head")


def _age(kept: KeptTable) -> str:
    ago_s = time.time() - kept.table.measured_at_s
    return "measured now" if kept.fresh else f"measured {duration(ago_s)} ago" if ago_s >= 1 else "measured just now"


def _show_layers(table: OperatorTable, weights: int) -> None:
    """Of the whole linears of a layer, a multiply-add is two operations."""
    grown = grid("one layer: rows", "forward ms", "GFLOP/s", "backward ms", "GFLOP/s")
    layer = table.layer[1]
    for rows, forward, backward in zip(
        layer.forward.counts, layer.forward.seconds, layer.backward.seconds, strict=True
    ):
        operations = 2e-9 * weights * rows
        speeds = (f"{operations / one:.0f}" if one > 0 else "-" for one in (forward, backward))
        first, second = speeds
        grown.add_row(f"{rows:.0f}", _ms(forward), first, _ms(backward), second)
    console(sys.stdout).print(grown, soft_wrap=True)


def _show_counts(heading: str, cost: Directions) -> None:
    grown = grid(heading, "forward ms", "backward ms")
    for count, forward, backward in zip(cost.forward.counts, cost.forward.seconds, cost.backward.seconds, strict=True):
        grown.add_row(f"{count:.0f}", _ms(forward), _ms(backward))
    print()
    console(sys.stdout).print(grown, soft_wrap=True)


def _show_adapters(table: OperatorTable) -> None:
    whole = table.layers * (table.layer[1].forward(_TOKENS) + table.layer[1].backward(_TOKENS))
    heading = f"adapter on {_TOKENS} rows, in all layers"
    grown = grid(
        heading,
        "parameters",
        "forward ms",
        "backward ms",
        "of the layers",
        "step ms",
    )
    for label, sizes in sorted(table.adapters.items()):
        for one in sizes:
            forward, backward = float(one.cost.forward(_TOKENS)), float(one.cost.backward(_TOKENS))
            step = float(table.optimizer(one.parameters)) + one.step_s
            share = f"{(forward + backward) / float(whole):.1%}" if whole > 0 else "-"
            cells = (f"{one.parameters:,}", _ms(forward), _ms(backward), share, _ms(step))
            grown.add_row(label, *(cells if one.parameters else ("-", *cells[1:4], "-")))
    print()
    console(sys.stdout).print(grown, soft_wrap=True)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
