"""What a rank's memory grows by when it loads its part: about its share, and never by the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from muxtune.models.safetensors_file import TensorEntry
from muxtune.parallel import slices
from muxtune.parallel.mesh import TensorAxis
from muxtune.parallel.tensor import load_sharded
from tests.engine.build import CPU
from tests.parallel.ranks import RankGroup

MIB = 1 << 20
SLACK = 12 * MIB  # the module tree, the allocator, code that a first load brings in


def test_loading_takes_a_ranks_share(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_hidden_layers=6,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    whole_bytes = sum(value.numel() * 4 for value in model.parameters())
    del model
    group = RankGroup(2)
    try:
        shares = group.ask(_grown, tmp_path)
    finally:
        group.close()
    assert sum(own for own, _, _ in shares) < 1.01 * whole_bytes
    for own, held, peak in shares:
        assert own < 0.52 * whole_bytes
        assert own - SLACK < held < own + SLACK, (own / MIB, held / MIB)
        assert peak < own + SLACK < whole_bytes, (own / MIB, peak / MIB)


def _grown(axis: TensorAxis, path: Path) -> tuple[int, int, int]:
    """Bytes of the rank's parameters; by how much its PSS has grown; the most that its own pages had grown by after
    any tensor was read."""
    read, grown = slices._read, list[int]()

    def note(entry: TensorEntry, part: slices.Slice | None) -> torch.Tensor:
        value = read(entry, part)
        grown.append(_kib("status", "RssAnon") - began)
        return value

    began, before = _kib("status", "RssAnon"), _kib("smaps_rollup", "Pss")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "_read", note)
        backbone = load_sharded(path, axis, dtype=torch.float32, device=CPU)
    own = sum(value.numel() * value.element_size() for value in backbone.model.parameters())
    return own, (_kib("smaps_rollup", "Pss") - before) * 1024, max(grown) * 1024


def _kib(file: str, field: str) -> int:
    for line in Path(f"/proc/self/{file}").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise AssertionError(f"no {field}")
