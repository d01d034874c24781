"""`make bench-link`: two ranks over a real, slow link on one machine, one task at a time and several in turns.

    python -m benchmarks.link [--mbit 100 300 1000] [--layers 12] [--tasks 4] [--tokens 128] [--rounds 5] [--out FILE]

Two network namespaces are joined by a pair of virtual interfaces, each shaped by a token bucket (`tc ... tbf`); one
rank of one thread runs in each, on a model of SmolLM2-135M's shape with random weights and `--layers` layers. What each
way of running does is in `benchmarks.link_rank`. Needs root, `ip` and `tc`: without them it says so and does nothing.
Namespaces are taken down whatever happens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

_NETWORK = "10.213.77"
_PORT = 29417
_LIMIT_S = 900
Told = Mapping[str, Mapping[str, float]]


def main() -> int:
    """Measure at each rate, and print a table. Returns the exit status."""
    parser = argparse.ArgumentParser(description="two ranks over a shaped link")
    parser.add_argument("--mbit", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if lacking := _lacking():
        print(f"skipped: {lacking}")
        return 0
    found: dict[int, Told] = {}
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder), asked.layers)
        sizes = ["--tasks", str(asked.tasks), "--tokens", str(asked.tokens), "--rounds", str(asked.rounds)]
        for mbit in asked.mbit:
            with shaped(mbit) as places:
                found[mbit] = _measure(places, Path(folder), sizes)
            _show(mbit, found[mbit])
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1))
    return 0


def _lacking() -> str:
    """What of what it needs there is not."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"there is no {' and no '.join(missing)}" if missing else ""


def _write_model(folder: Path, layers: int) -> None:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@contextmanager
def shaped(mbit: int) -> Iterator[tuple[str, str]]:
    """Two namespaces joined by a link of so many Mbit/s each way; (name, interface) is the same word in both."""
    names = tuple(f"muxlink{os.getpid()}{side}" for side in "ab")
    ends = ("muxl-a", "muxl-b")
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run(
            "ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1]
        )
        for rank, (name, end) in enumerate(zip(names, ends, strict=True)):
            _run("ip", "-n", name, "addr", "add", f"{_NETWORK}.{rank + 1}/24", "dev", end)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", end, "up")
            bucket = ("rate", f"{mbit}mbit", "burst", "128kb", "latency", "400ms")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", "tbf", *bucket)
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _measure(places: Sequence[str], folder: Path, sizes: Sequence[str]) -> Told:
    """What the first rank tells."""
    told_all = [str(folder), f"tcp://{_NETWORK}.1:{_PORT}"]
    program = [sys.executable, "-m", "benchmarks.link_rank"]
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", place, *program, *told_all, str(rank), *sizes],
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"muxl-{'ab'[rank]}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, place in enumerate(places)
    ]
    try:
        said = [rank.communicate(timeout=_LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("a rank has failed: see what it said above")
    told: Told = json.loads(said[0].strip().splitlines()[-1])
    return told


def _show(mbit: int, told: Told) -> None:
    first = told["alone"]["tokens_per_s"]
    for name, way in told.items():
        print(
            f"{mbit:5d} Mbit/s  {name:6s} {way['round_s']:7.2f} s a round  {way['tokens_per_s']:7.1f} tokens/s "
            f"{way['tokens_per_s'] / first:5.2f}x  stalled {100 * way['stall_share']:4.1f} %"
            f"  computing {100 * way['utilisation']:4.1f} %",
            flush=True,
        )


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
