"""The yardstick for bottleneck adapters and the selective types: transformers with the method put in the plain way.

What peft has (BEFT, LN_TUNING, SHIRA) is peft's; what it has not is written here from the published equations with
ordinary modules, hooks and trained biases. Either way a `Plain` holds a model of its own and names each trained tensor
as our adapters name theirs, so that both can start from the same values and be compared.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import BeftConfig, LNTuningConfig, PeftConfig, ShiraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, get_scheduler
from transformers.pytorch_utils import Conv1D

from muxtune.data.types import TokenSequence
from muxtune.spec.peft import Bottleneck
from tests.reference import ADAPTER, _Layout, pad

Batches = Sequence[Sequence[TokenSequence]]

# Where the papers put a network: below a layer, by family. None has a recipe of ours in it.
AFTER_ATTENTION = {"llama": "self_attn.o_proj", "gpt2": "attn.c_proj", "opt": "self_attn.out_proj"}
AFTER_MLP = {"llama": "mlp.down_proj", "gpt2": "mlp.c_proj", "opt": "fc2"}
MLP = {"llama": "mlp", "gpt2": "mlp"}


@dataclass(frozen=True, slots=True)
class Plain:
    """A model that has the method in it. `base` is what a trained tensor stands at where ours stands at zero."""

    model: nn.Module
    trained: Mapping[str, nn.Parameter]
    base: Mapping[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        assert values.keys() == self.trained.keys(), sorted(values.keys() ^ self.trained.keys())
        for name, parameter in self.trained.items():
            start = values[name].to(parameter).view(parameter.shape)
            parameter.copy_(start + self.base[name] if name in self.base else start)

    def values(self) -> dict[str, Tensor]:
        held = {name: parameter.detach().clone() for name, parameter in self.trained.items()}
        return {name: value - self.base[name] if name in self.base else value for name, value in held.items()}


@dataclass(frozen=True, slots=True)
class PlainResult:
    """Gradients are those of step 1, before clipping."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)


def train_plain(
    plain: Plain, batches: Batches, *, learning_rate: float, weight_decay: float = 0.0, max_grad_norm: float = 1.0
) -> PlainResult:
    """Train in place on padded batches, one an optimizer step, with AdamW under a linear schedule."""
    parameters = list(plain.trained.values())
    assert set(parameters) == {parameter for parameter in plain.model.parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=len(batches))
    result = PlainResult()
    for batch in batches:
        denominator = sum(sequence.trained_tokens for sequence in batch)
        with torch.sparse.check_sparse_tensor_invariants(True):  # torch warns where nobody says (peft's SHiRA)
            output = plain.model(**pad(batch, "right", _Layout()), num_items_in_batch=denominator, use_cache=False)
        output.loss.backward()
        if not result.gradients:
            result.gradients.update({name: value.grad.clone() for name, value in plain.trained.items()})
        result.losses.append(float(output.loss.detach()))
        result.grad_norms.append(float(nn.utils.clip_grad_norm_(parameters, max_grad_norm or math.inf)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    result.values.update(plain.values())
    return result


def bottleneck(model: PreTrainedModel, arch: str, spec: Bottleneck) -> Plain:
    """h += s (U f(D h + a) + b), h the output of an operator; or, in parallel, beside the feed-forward sublayer."""
    model = _frozen(model)
    places = {"houlsby": (AFTER_ATTENTION, AFTER_MLP), "pfeiffer": (AFTER_MLP,), "parallel": (MLP,)}[spec.placement]
    function = {"relu": F.relu, "gelu": F.gelu, "swish": F.silu, "tanh": torch.tanh}[spec.non_linearity]
    width = model.config.hidden_size
    size = spec.bottleneck_size or max(1, int(width / spec.reduction_factor))
    trained: dict[str, nn.Parameter] = {}
    for name, module in list(model.named_modules()):
        if not any(_below_a_layer(name, place[arch]) for place in places):
            continue
        down, up = nn.Linear(width, size), nn.Linear(size, width)
        for part, linear in (("down", down), ("up", up)):
            module.register_module(f"bottleneck_{part}", linear.to(model.dtype))
            trained |= {f"{name}.bottleneck_{part}.{key}": value for key, value in linear.named_parameters()}
        module.register_forward_hook(_network(down, up, function, float(spec.scaling), spec.placement == "parallel"))
    return Plain(model, trained)


def _network(
    down: nn.Linear, up: nn.Linear, function: Callable[[Tensor], Tensor], scale: float, parallel: bool
) -> Callable[..., Tensor]:
    def hook(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + scale * up(function(down(arguments[0] if parallel else output)))

    return hook


def biases(model: PreTrainedModel) -> Plain:
    """BitFit as published: the biases of the layers' linears and norms, and of the last norm, themselves."""
    model = _frozen(model)
    head = model.get_output_embeddings()
    trained = {
        f"{name}.bias": module.bias.requires_grad_()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D | nn.LayerNorm) and module is not head and module.bias is not None
    }
    return Plain(model, trained, {name: value.detach().clone() for name, value in trained.items()})


def beft(model: PreTrainedModel, targets: Sequence[str]) -> Plain:
    tuned = _with_peft(model, BeftConfig(task_type="CAUSAL_LM", target_modules=list(targets)))
    layers = _layers(tuned, "beft_bias")
    return Plain(tuned, {f"{name}.bias": layer.beft_bias[ADAPTER] for name, layer in layers.items()})


def ln_tuning(model: PreTrainedModel, targets: Sequence[str]) -> Plain:
    tuned = _with_peft(model, LNTuningConfig(task_type="CAUSAL_LM", target_modules=list(targets)))
    return Plain(
        tuned,
        {
            f"{name}.{key}": value
            for name, layer in _layers(tuned, "ln_tuning_layers").items()
            for key, value in layer.ln_tuning_layers[ADAPTER].named_parameters()
        },
    )


def shira(model: PreTrainedModel, targets: Sequence[str], r: int, places: Mapping[str, Tensor]) -> Plain:
    """peft's, with these places [2, P] of each module."""
    tuned = _with_peft(model, ShiraConfig(task_type="CAUSAL_LM", target_modules=list(targets), r=r))
    layers = _layers(tuned, "shira_weight")
    for name, layer in layers.items():
        assert layer.shira_indices[ADAPTER].shape == places[name].shape
        layer.shira_indices[ADAPTER] = places[name].int()
    return Plain(tuned, {f"{name}.shira_weight": layer.shira_weight[ADAPTER] for name, layer in layers.items()})


def sparse(model: PreTrainedModel, places: Mapping[str, Tensor]) -> Plain:
    """x (W + S)^T on any linear, peft's or not: a Conv1D, say."""
    model = _frozen(model)
    trained: dict[str, nn.Parameter] = {}
    for name, (rows_P, columns_P) in places.items():
        module = model.get_submodule(name)
        weight_P = nn.Parameter(torch.zeros(rows_P.numel(), dtype=model.dtype))
        module.register_parameter("shira_weight", weight_P)
        shape = module.weight.shape[::-1] if isinstance(module, Conv1D) else module.weight.shape
        module.register_forward_hook(_delta(weight_P, rows_P, columns_P, torch.Size(shape)))
        trained[f"{name}.shira_weight"] = weight_P
    return Plain(model, trained)


def _delta(weight_P: Tensor, rows_P: Tensor, columns_P: Tensor, shape_OI: torch.Size) -> Callable[..., Tensor]:
    def hook(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        dense_OI = torch.zeros(shape_OI, dtype=weight_P.dtype).index_put((rows_P, columns_P), weight_P)
        return output + arguments[0] @ dense_OI.T

    return hook


def _frozen(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).requires_grad_(False).eval()


@contextmanager
def peft_as_it_is() -> Iterator[None]:
    """peft warns of linears without bias (BEFT cannot merge there) and of every norm it tunes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected that the base layer has no bias term")
        warnings.filterwarnings("ignore", "Unsupported layer type")
        yield


def _with_peft(model: PreTrainedModel, config: PeftConfig) -> nn.Module:
    with peft_as_it_is():
        tuned = get_peft_model(copy.deepcopy(model), config, autocast_adapter_dtype=False)
    return tuned.to(model.dtype).eval()


def _layers(tuned: nn.Module, attribute: str) -> dict[str, Any]:
    """peft's layers by their name in the bare backbone."""
    backbone = tuned.base_model.model
    return {name: module for name, module in backbone.named_modules() if hasattr(module, attribute)}


def _below_a_layer(name: str, path: str) -> bool:
    before, _, rest = name.partition(f".{path}")
    return rest == "" and before != name and before.rpartition(".")[2].isdigit()
