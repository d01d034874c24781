"""Folders of bottleneck adapters and the selective types: peft loads what it knows, plain modules the rest, we all."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import peft
import pytest
import torch
from peft.utils import PeftType
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from muxtune.errors import AdapterError
from muxtune.peft.base import Adapter
from muxtune.peft.folder import write_adapter
from muxtune.peft.registry import TYPES, MergeableType, build_adapter, give, payload, read_stored, start_from
from muxtune.spec.peft import BitFit, Bottleneck, LnTuning, PeftBase, Shira
from tests import reference_types
from tests.engine.build import CPU, backbone_of
from tests.engine.prompts import PeftTrial
from tests.engine.selective import LINEARS, NORMS, plain_of, start_of
from tests.peft.adapters import MANIFEST, some_ids
from tests.reference_types import peft_as_it_is
from tests.tiny import tiny_model

HOULSBY = Bottleneck(placement="houlsby", bottleneck_size=5, non_linearity="gelu", scaling=0.5)
PARALLEL = Bottleneck(placement="parallel", non_linearity="swish", scaling=4)
NO_NORMS = BitFit(target_modules=LINEARS["opt"], norm_biases=False)

# architecture, spec, peft_type of the folder
CASES = {
    "beft": ("llama", BitFit(), "BEFT"),
    "beft on linears with a bias": ("opt", NO_NORMS, "BEFT"),
    "bitfit with norms": ("opt", BitFit(), "MUXTUNE_BITFIT"),
    "bitfit on Conv1D": ("gpt2", BitFit(), "MUXTUNE_BITFIT"),
    "norms": ("llama", LnTuning(), "LN_TUNING"),
    "norms with biases": ("gpt2", LnTuning(), "LN_TUNING"),
    "norms of one name in two places": ("opt", LnTuning(), "LN_TUNING"),
    "one norm": ("llama", LnTuning(target_modules=("layers.1.input_layernorm",)), "LN_TUNING"),
    "shira": ("llama", Shira(r=2), "SHIRA"),
    "shira on linears with a bias": ("opt", Shira(r=2, target_modules=("q_proj", "fc1")), "SHIRA"),
    "shira on Conv1D": ("gpt2", Shira(r=2), "SHIRA"),
    "houlsby": ("llama", HOULSBY, "MUXTUNE_BOTTLENECK"),
    "pfeiffer": ("opt", Bottleneck(), "MUXTUNE_BOTTLENECK"),
    "parallel": ("gpt2", PARALLEL, "MUXTUNE_BOTTLENECK"),
}
FOR_PEFT = [case for case, (arch, _, kind) in CASES.items() if not kind.startswith("MUXTUNE") and arch != "gpt2"]
FOR_PEFT.append("norms with biases")


@cache
def _adapter(case: str) -> Adapter:
    """Not at its start."""
    arch, spec, _ = CASES[case]
    return start_of(backbone_of(arch), PeftTrial(case, spec, [4], seed=5))


def _write(case: str, folder: Path) -> Path:
    arch, spec, _ = CASES[case]
    write_adapter(folder, payload(spec, _adapter(case), backbone_of(arch)), MANIFEST)
    return folder


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad(), torch.sparse.check_sparse_tensor_invariants(True):
        found: Tensor = model(some_ids()).logits
    return found


def _expected(case: str) -> Tensor:
    """What the plain twin answers with the adapter's own numbers, in fp64."""
    arch, spec, _ = CASES[case]
    trial = PeftTrial(case, spec, [4], seed=5)
    if case == "beft on linears with a bias":
        plain = reference_types.beft(tiny_model(arch, dtype=torch.float64), LINEARS[arch])
        plain.load({name: view.detach() for name, view in _adapter(case).parameters.views.items()})
        return _logits(plain.model)
    if case == "shira on linears with a bias":
        places = {name.removesuffix(".shira_indices"): place for name, place in _adapter(case).fixed.items()}
        plain = reference_types.sparse(tiny_model(arch, dtype=torch.float64), places)
        plain.load({name: view.detach() for name, view in _adapter(case).parameters.views.items()})
        return _logits(plain.model)
    return _logits(plain_of(arch, trial, torch.float64, _adapter(case)).model)


@pytest.mark.parametrize("case", FOR_PEFT)
def test_peft_loads_what_we_write(case: str, tmp_path: Path) -> None:
    arch, _, kind = CASES[case]
    folder = _write(case, tmp_path / "adapter")
    base = tiny_model(arch, dtype=torch.float64)
    before = _logits(base)
    with peft_as_it_is():
        model = peft.PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False)
        answer = model.load_adapter(folder, adapter_name="again", autocast_adapter_dtype=False)
    assert model.peft_config["default"].peft_type is PeftType[kind]
    assert not [key for key in answer.unexpected_keys if not key.endswith("shira_indices")]
    own = ("beft_bias", "ln_tuning_layers", "shira_weight")
    assert not [key for key in answer.missing_keys if any(f"{part}.again" in key for part in own)]
    adapted = {name for name, module in base.named_modules() if any(hasattr(module, part) for part in own)}
    assert adapted == set(_adapter(case).modules), "peft must adapt exactly the modules that were trained"
    logits = _logits(model.double().eval())
    torch.testing.assert_close(logits, _expected(case), rtol=1e-6, atol=1e-6)  # the file is fp32
    assert float((logits - before).abs().max()) > 1e-2, "nothing was loaded"


@pytest.mark.parametrize("case", CASES)
def test_we_read_what_we_write_bit_for_bit(case: str, tmp_path: Path) -> None:
    arch, spec, kind = CASES[case]
    backbone, folder = backbone_of(arch), _write(case, tmp_path / "adapter")
    assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == kind
    stored = read_stored(folder, backbone, base_sha256=MANIFEST.base.weights_sha256)
    state = _adapter(case).state()
    assert stored.values.keys() == state.keys()
    assert all(torch.equal(stored.values[name], state[name]) for name in state)
    # Whoever loads it builds by the stored spec, with a seed of their own; and a job may start from it.
    other = build_adapter(stored.spec, backbone, seed=99, dtype=torch.float32, device=CPU)
    give(other, stored.values, where="folder")
    assert all(torch.equal(value, state[name]) for name, value in other.state().items())
    fresh = build_adapter(spec, backbone, seed=98, dtype=torch.float32, device=CPU)
    start_from(spec, fresh, folder, backbone, base_sha256=None)
    assert all(torch.equal(value, state[name]) for name, value in fresh.state().items())
    again = payload(stored.spec, other, backbone)
    assert again.config == payload(spec, _adapter(case), backbone).config


@pytest.mark.parametrize("case", ["bitfit with norms", "bitfit on Conv1D", "houlsby", "pfeiffer", "parallel"])
def test_our_own_formats_are_as_documented(case: str, tmp_path: Path) -> None:
    """Read with safetensors, JSON and plain modules alone."""
    arch, _, _ = CASES[case]
    folder = _write(case, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = {
        name.removeprefix("base_model.model."): tensor
        for name, tensor in load_file(folder / "adapter_model.safetensors").items()
    }
    model = tiny_model(arch, dtype=torch.float64)
    if config["peft_type"] == "MUXTUNE_BITFIT":
        for name, delta_O in tensors.items():
            bias = model.get_submodule(name.removesuffix(".bitfit_bias")).bias
            bias.data += delta_O
    else:
        keys = ("placement", "reduction_factor", "bottleneck_size", "non_linearity", "scaling")
        plain = reference_types.bottleneck(model, arch, Bottleneck(**{key: config[key] for key in keys}))
        plain.load(tensors)
        model = plain.model
    torch.testing.assert_close(_logits(model), _expected(case), rtol=1e-6, atol=1e-6)
    assert "PeftModel" not in (folder / "README.md").read_text(), "peft cannot load it"


def _saved_by_peft(config: peft.PeftConfig, folder: Path, *, arch: str = "llama") -> PreTrainedModel:
    torch.manual_seed(5)
    base = tiny_model(arch)
    with peft_as_it_is():
        model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(6)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(
    "config",
    [
        peft.BeftConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"]),
        peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["input_layernorm", "norm"]),
        peft.LNTuningConfig(
            task_type="CAUSAL_LM", target_modules=["input_layernorm"], exclude_modules=["0.input_layernorm"]
        ),
        peft.ShiraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], r=3, random_seed=4),
        peft.ShiraConfig(task_type="CAUSAL_LM", target_modules=["v_proj"], r=2),
    ],
    ids=lambda config: config.peft_type.value,
)  # fmt: skip
def test_we_read_what_peft_writes(config: peft.PeftConfig, tmp_path: Path) -> None:
    theirs = _saved_by_peft(config, tmp_path)
    backbone = backbone_of("llama")
    stored = read_stored(tmp_path, backbone, base_sha256=None)
    assert stored.manifest is None
    adapter = build_adapter(stored.spec, backbone, seed=1, dtype=torch.float32, device=CPU)
    give(adapter, stored.values, where="folder")
    export = tmp_path / "again"
    write_adapter(export, payload(stored.spec, adapter, backbone), MANIFEST)
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, export))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    with peft_as_it_is():
        loaded = peft.PeftModel.from_pretrained(tiny_model("llama"), export)
    torch.testing.assert_close(_logits(loaded), _logits(theirs))


def test_places_in_any_order_are_read_as_the_same_delta(tmp_path: Path) -> None:
    folder = _write("shira", tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith("shira_weight")]:
        order_P = torch.randperm(tensors[name].numel(), generator=generator)
        places = name.replace("shira_weight", "shira_indices")
        tensors[name], tensors[places] = tensors[name][order_P], tensors[places][:, order_P].contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    stored = read_stored(folder, backbone_of("llama"), base_sha256=None)
    state = _adapter("shira").state()
    assert all(torch.equal(stored.values[name], state[name]) for name in state)


Tensors = dict[str, Tensor]


def _first(tensors: Tensors, ending: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(ending))


def _far(tensors: Tensors) -> None:
    tensors[_first(tensors, "shira_indices")][1, 0] = 80  # the widest input there is


def _negative(tensors: Tensors) -> None:
    tensors[_first(tensors, "shira_indices")][0, 3] = -1


def _twice(tensors: Tensors) -> None:
    places = tensors[_first(tensors, "shira_indices")]
    places[:, 7] = places[:, 2]


def _not_a_number(tensors: Tensors) -> None:
    next(value for value in tensors.values() if value.is_floating_point()).fill_(float("nan"))


def _short(tensors: Tensors) -> None:
    name = next(name for name, value in sorted(tensors.items()) if value.is_floating_point())
    tensors[name] = tensors[name].flatten()[1:].clone()


def _missing(tensors: Tensors) -> None:
    del tensors[min(tensors)]


def _extra(tensors: Tensors) -> None:
    tensors["base_model.model.lm_head.weight"] = torch.zeros(4)


def _whole_numbers(tensors: Tensors) -> None:
    name = next(name for name, value in sorted(tensors.items()) if value.is_floating_point())
    tensors[name] = tensors[name].int()


@pytest.mark.parametrize("case", ["beft", "bitfit with norms", "norms", "shira", "houlsby"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_not_a_number, "NaN"),
        (_short, "need"),
        (_missing, "missing"),
        (_extra, "do not fit"),
        (_whole_numbers, "is I32"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(
    case: str, spoil: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    _refused(case, spoil, message, tmp_path)


@pytest.mark.parametrize(
    ("spoil", "message"), [(_far, "outside"), (_negative, "outside"), (_twice, "the same place twice")]
)
def test_places_that_are_none_are_refused(spoil: Callable[[Tensors], None], message: str, tmp_path: Path) -> None:
    _refused("shira", spoil, message, tmp_path)


def _refused(case: str, spoil: Callable[[Tensors], None], message: str, tmp_path: Path) -> None:
    folder = _write(case, tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    spoil(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=message) as caught:
        read_stored(folder, backbone_of(CASES[case][0]), base_sha256=None)
    assert "adapter_model.safetensors" in (caught.value.where or "")


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("beft", {"target_modules": ".*_proj"}, "pattern"),
        ("beft", {"target_modules": ["lm_head"]}, "no linear"),
        ("beft", {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ("beft", {"surprise": 1}, "unknown key"),
        ("bitfit with norms", {"norm_biases": "yes"}, "true or false"),
        ("bitfit with norms", {"norm_biases": False}, "do not fit"),
        ("norms", {"target_modules": ["q_proj"]}, "no norm"),
        ("norms", {"target_modules": ["norm"]}, "do not fit"),
        ("norms", {"auto_mapping": {"base_model_class": "x"}}, "auto_mapping"),
        ("shira", {"r": 3}, "need"),
        ("shira", {"r": True}, "r must be"),
        ("shira", {"r": 65536}, "asks for"),
        ("shira", {"r": 10**9}, "r must be"),
        ("houlsby", {"placement": "sideways"}, "placement"),
        ("houlsby", {"bottleneck_size": 10**9}, "bottleneck_size"),
        ("houlsby", {"bottleneck_size": 6}, "need"),
        ("houlsby", {"scaling": "nan"}, "scaling"),
        ("houlsby", {"placement": "pfeiffer"}, "do not fit"),
        ("pfeiffer", {"placement": "parallel"}, "has no place"),
        ("houlsby", {"non_linearity": "os.system"}, "non_linearity"),
    ],
)  # fmt: skip
def test_configs_that_do_not_fit_are_refused(
    case: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = _write(case, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match=message) as caught:
        read_stored(folder, backbone_of(CASES[case][0]), base_sha256=None)
    assert str(folder) in (caught.value.where or "")


def test_another_base_is_refused(tmp_path: Path) -> None:
    folder = _write("norms", tmp_path / "adapter")
    with pytest.raises(AdapterError, match="other base weights"):
        read_stored(folder, backbone_of("llama"), base_sha256="00" * 32)


def test_an_adapter_that_is_not_finite_is_not_exported() -> None:
    for arch, spec, _ in CASES.values():
        backbone = backbone_of(arch)
        adapter = build_adapter(spec, backbone, seed=1, dtype=torch.float32, device=CPU)
        adapter.parameters.values.fill_(float("inf"))
        with pytest.raises(AdapterError, match="NaN or infinity"):
            payload(spec, adapter, backbone)


@pytest.mark.parametrize("case", [case for case, (_, spec, _) in CASES.items() if not isinstance(spec, Bottleneck)])
def test_what_it_makes_of_the_base_models_parameters_acts_as_it_does(case: str, tmp_path: Path) -> None:
    arch, spec, _ = CASES[case]
    kind, backbone = TYPES[type(spec)], backbone_of(arch)
    stored = read_stored(_write(case, tmp_path / "adapter"), backbone, base_sha256=None)
    assert isinstance(kind, MergeableType)
    if case == "beft":
        with pytest.raises(AdapterError, match="have none in the base model"):
            kind.changes(stored, backbone)
        return
    model = tiny_model(arch, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    for name, change in kind.changes(stored, backbone).items():
        turned = arch == "gpt2" and parameters[name].ndim == 2
        old = parameters[name].data.T if turned else parameters[name].data
        new = change(old)
        assert new.dtype == torch.float64 and new.shape == old.shape
        parameters[name].data = new.T if turned else new
    torch.testing.assert_close(_logits(model), _expected(case), rtol=1e-6, atol=1e-6)


def test_a_network_beside_the_model_cannot_be_merged() -> None:
    assert not isinstance(TYPES[Bottleneck], MergeableType)


def test_every_case_is_covered() -> None:
    kinds: set[type[PeftBase]] = {type(spec) for _, spec, _ in CASES.values()}
    assert kinds == {BitFit, Bottleneck, LnTuning, Shira} and set(NORMS) == set(LINEARS)
