"""Loading a part of a model: the right numbers, nothing else of them, and faults found as on one device."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from muxtune.errors import ConfigError, ModelError
from muxtune.models import attention
from muxtune.models.layout import check_folder
from muxtune.models.safetensors_file import TensorEntry
from muxtune.parallel import slices
from muxtune.parallel.mesh import TensorAxis
from muxtune.parallel.shard import split
from muxtune.parallel.slices import Slice, cuts_of, sizes_of, whole_of
from muxtune.parallel.tensor import ShardedBackbone, load_sharded
from tests.engine.build import CPU
from tests.tiny import tiny_folder

Folder = Callable[[str], Path]
WEIGHTS = "model.safetensors"


def _load(path: Path, rank: int, size: int = 2) -> ShardedBackbone:
    return load_sharded(path, TensorAxis(rank, size), dtype=torch.float64, device=CPU)


def _held(backbone: ShardedBackbone) -> int:
    return sum(value.numel() for value in backbone.model.parameters())


@pytest.mark.parametrize(
    "arch", ["llama-uneven", "llama", "qwen2", "qwen3", "mistral", "gpt2", "gemma2", "gemma3-two", "opt"]
)
def test_the_ranks_parts_make_up_the_model(arch: str, folder: Folder) -> None:
    """Cut parameters partition the file's; the others are held by all."""
    stored = load_file(folder(arch) / WEIGHTS)
    ranks = [_load(folder(arch), rank) for rank in range(2)]
    parts = [dict(backbone.model.named_parameters()) for backbone in ranks]
    named = {name.removeprefix("transformer."): name for name in parts[0]} | {name: name for name in parts[0]}
    assert {named[key] for key in stored} == set(parts[0])
    for key, value in stored.items():
        own = [part[named[key]] for part in parts]
        if own[0].shape == own[1].shape == value.shape:
            assert all(torch.equal(one, value) for one in own), key
        else:
            assert sum(one.numel() for one in own) == value.numel(), key
            assert torch.equal(torch.cat([one.flatten() for one in own]).sort()[0], value.flatten().sort()[0]), key


def test_a_ranks_matrices_are_the_ranges_of_its_heads_and_units(folder: Folder) -> None:
    stored = load_file(folder("llama-uneven") / WEIGHTS)
    for rank in range(2):
        backbone = _load(folder("llama-uneven"), rank)
        own = dict(backbone.model.named_parameters())
        groups, units = backbone.part.groups, backbone.part.units
        q = stored["model.layers.1.self_attn.q_proj.weight"][groups.start * 48 : groups.stop * 48]
        assert torch.equal(own["model.layers.1.self_attn.q_proj.weight"], q)
        o = stored["model.layers.1.self_attn.o_proj.weight"][:, groups.start * 48 : groups.stop * 48]
        assert torch.equal(own["model.layers.1.self_attn.o_proj.weight"], o)
        down = stored["model.layers.0.mlp.down_proj.weight"][:, units.start : units.stop]
        assert torch.equal(own["model.layers.0.mlp.down_proj.weight"], down)
        assert backbone.attention_shape == (3 * len(groups), len(groups), 16)


def test_the_fused_projection_of_gpt2_gives_each_rank_queries_keys_and_values(folder: Folder) -> None:
    fused = load_file(folder("gpt2") / WEIGHTS)["transformer.h.0.attn.c_attn.weight"]
    backbone = _load(folder("gpt2"), 1)
    (start, stop) = backbone.part.groups.start * 16, backbone.part.groups.stop * 16
    expected = torch.cat([third[:, start:stop] for third in fused.split(48, dim=1)], dim=1)
    assert torch.equal(backbone.attach_points["transformer.h.0.attn.c_attn"].weight, expected)


def test_each_rank_holds_about_its_share(folder: Folder) -> None:
    """Norms aside, which all hold; a tied table counts once."""
    whole = sum(value.numel() for value in load_file(folder("llama-uneven") / WEIGHTS).values())
    held = [_held(_load(folder("llama-uneven"), rank)) for rank in range(2)]
    assert whole <= sum(held) < 1.01 * whole
    assert max(held) < 0.56 * whole


def test_no_more_than_its_ranges_is_read(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tensors are asked of the file only where they are held whole."""
    asked: list[str] = []
    read = slices._read

    def note(entry: TensorEntry, part: Slice | None) -> torch.Tensor:
        if part is None:
            asked.append(entry.name)
        return read(entry, part)

    monkeypatch.setattr(slices, "_read", note)
    _load(folder("llama-uneven"), 0)
    assert asked and all("norm" in name for name in asked)


def test_the_split_is_that_of_the_sizes(folder: Folder) -> None:
    attention.register()
    whole = whole_of(check_folder(folder("llama-uneven")), None)
    sizes = sizes_of(whole)
    assert (sizes.heads, sizes.groups, sizes.head_width, sizes.units, sizes.mlp_products) == (9, 3, 16, 128, 3)
    cuts = cuts_of(whole, sizes, split(sizes, 2)[1])
    assert not any("norm" in name for name in cuts)
    assert {"model.embed_tokens", "lm_head"} <= cuts.keys()


def test_a_part_may_be_cut_to_its_first_layers(folder: Folder) -> None:
    backbone = load_sharded(folder("llama"), TensorAxis(0, 2), dtype=torch.float64, device=CPU, num_hidden_layers=1)
    assert len(backbone.blocks) == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda held: held.pop("model.norm.weight"), "lacks: model.norm.weight"),
        (lambda held: held.update({"model.norm.weight": torch.ones(7)}), "another shape: model.norm.weight"),
        (lambda held: held.update({"model.norm.bias": torch.ones(48)}), "does not use: model.norm.bias"),
        (lambda held: held["model.norm.weight"].fill_(float("nan")), "model.norm.weight is not finite"),
    ],
)
def test_faults_of_the_weights_are_found(change: Callable[..., object], told: str, tmp_path: Path) -> None:
    tiny_folder(tmp_path, "llama")
    held = load_file(tmp_path / WEIGHTS)
    change(held)
    save_file(held, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match=told):
        _load(tmp_path, 1)


def test_a_family_that_is_not_known_to_come_out_exact_is_refused(folder: Folder) -> None:
    with pytest.raises(ModelError, match="'bloom' cannot be split over ranks yet"):
        _load(folder("bloom"), 0)


def test_too_many_ranks_are_refused(folder: Folder) -> None:
    with pytest.raises(ConfigError, match="2 key/value heads"):
        _load(folder("llama"), 0, size=3)


def test_weights_without_the_bodys_prefix_are_found(folder: Folder, tmp_path: Path) -> None:
    """As GPT-2's own checkpoint has them, with a mask that nothing uses any more."""
    shutil.copytree(folder("gpt2"), tmp_path / "bare")
    held = load_file(tmp_path / "bare" / WEIGHTS)
    bare = {name.removeprefix("transformer."): value for name, value in held.items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "bare" / WEIGHTS)
    one, other = _load(folder("gpt2"), 0), _load(tmp_path / "bare", 0)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
