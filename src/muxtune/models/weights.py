"""From a checked folder to a frozen transformers model, and the hash of its weights.

The boundary: files in, a module tree out; what is trained around it and how it runs is the business of others. No
tensor may be made up or left out in silence: a weight that the folder lacks, or has but the architecture does not use,
stops the load, and so does one that is not finite. Safetensors files are memory-mapped while they are read. Dropout and
layer dropping are zero in the config itself (GPT-2 and OPT have them on), so no later `train()` brings them back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from muxtune.errors import ModelError
from muxtune.models.layout import Layout, check_folder
from muxtune.models.loading import reading
from muxtune.models.safetensors_file import WeightsHash
from muxtune.models.sources import ModelFolder

_DROPS = re.compile(r"(.*_)?(dropout|pdrop|layerdrop)(_prob|_rate|_p)?")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_HASH_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_HASH_DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.int8: "I8", torch.bool: "BOOL"}
_HASH_BYTES = 8 << 20


def load_model(
    folder: ModelFolder,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    attn_implementation: str,
    num_hidden_layers: int | None = None,
) -> PreTrainedModel:
    """The folder's causal language model in evaluation mode, frozen, without dropout.

    `num_hidden_layers` keeps only the first layers, for fast checks. Raises ModelError for whatever is wrong with the
    folder or with its weights.
    """
    layout = check_folder(folder.path)
    config = training_config(layout, num_hidden_layers)
    model, info = _load(layout, config, dtype, attn_implementation)
    check_complete(model, info, layout, cut=num_hidden_layers)
    model.requires_grad_(False)
    model.eval()
    check_finite(model, layout)
    placed: PreTrainedModel = model.to(device)
    return placed


def weights_hash(source: PreTrainedModel | ModelFolder) -> str:
    """SHA-256 of all weights in name order (`WeightsHash` says of what exactly), streamed.

    Of a folder: its tensors on disk, remembered until they change. Of a model: its parameters, each shared one once.
    The two agree where the model has the folder's dtype and tensor names, as for a converted or exported folder.
    """
    if isinstance(source, ModelFolder):
        return source.weights_sha256
    digest = WeightsHash()
    for name, parameter in sorted(source.named_parameters()):
        digest.begin(name, _HASH_DTYPES[parameter.dtype], tuple(parameter.shape))
        data = parameter.detach().contiguous().view(-1).view(torch.uint8)
        for start in range(0, data.numel(), _HASH_BYTES):
            digest.update(data[start : start + _HASH_BYTES].cpu().numpy().data)
    return digest.hexdigest()


def training_config(layout: Layout, num_hidden_layers: int | None = None) -> PreTrainedConfig:
    """The folder's config without dropout, cut to its first layers if asked. Raises ModelError."""
    config = _config(layout)
    _switch_off_dropout(config)
    if num_hidden_layers is not None:
        _cut(config, num_hidden_layers, layout)
    return config


def _config(layout: Layout) -> PreTrainedConfig:
    if layout.model_type not in CONFIG_MAPPING:
        message = f"architecture {layout.model_type!r} is not known to transformers {transformers_version}"
        raise ModelError(message, where=str(layout.path))
    with reading("config.json", layout.path):
        config = AutoConfig.from_pretrained(layout.path, local_files_only=True, trust_remote_code=False)
    if config.is_encoder_decoder:
        raise ModelError(f"{layout.model_type} is an encoder-decoder, not a decoder", where=str(layout.path))
    return config


def _switch_off_dropout(config: PreTrainedConfig) -> None:
    for name, value in list(config.to_dict().items()):
        if _DROPS.fullmatch(name) and isinstance(value, (int, float)):
            setattr(config, name, 0.0)


def _cut(config: PreTrainedConfig, layers: int, layout: Layout) -> None:
    """Keep the first `layers` layers, in lists that say something of each layer too (`layer_types`)."""
    text = config.get_text_config()
    have = text.num_hidden_layers
    if not 1 <= layers <= have:
        raise ModelError(f"cannot keep {layers} layers of {have}", where=str(layout.path))
    for name, value in list(text.to_dict().items()):
        if "layer" in name and isinstance(value, list) and len(value) == have:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers


def _load(
    layout: Layout, config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str
) -> tuple[PreTrainedModel, dict[str, Iterable[str]]]:
    with reading("the weights", layout.path):
        model, info = AutoModelForCausalLM.from_pretrained(
            layout.path,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, by name
        )
    return model, info


def check_complete(model: PreTrainedModel, info: dict[str, Iterable[str]], layout: Layout, *, cut: int | None) -> None:
    """Every weight comes from the folder, and every weight of a module that exists is used; else raises ModelError.

    `info`: names of missing, unexpected and mismatched keys, as transformers gives them.
    """
    modules = {name for name, _ in model.named_modules()}
    modules |= {name.removeprefix(f"{model.base_model_prefix}.") for name in modules}  # of a bare model's checkpoint
    unused = [name for name in info["unexpected_keys"] if not _beyond(name, cut)]
    wrong = {
        "lacks": sorted(info["missing_keys"]),
        "has in another shape": sorted(map(str, info["mismatched_keys"])),
        "has, but the architecture does not use": sorted(n for n in unused if n.rpartition(".")[0] in modules),
    }
    for what, names in wrong.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            hint = "config.json and the weights are not of the same model"
            raise ModelError(f"it {what}: {', '.join(names[:3])}{more}", where=str(layout.path), hint=hint)


def _beyond(name: str, cut: int | None) -> bool:
    """Is this tensor of a layer that was cut off?"""
    layer = _LAYER.search(name)
    return cut is not None and layer is not None and int(layer[1]) >= cut


def check_finite(model: PreTrainedModel, layout: Layout) -> None:
    """Raises ModelError for the first weight that is not finite."""
    for name, parameter in model.named_parameters():
        if parameter.numel() and not parameter.is_meta:  # of another rank's part nothing is here
            low, high = torch.aminmax(parameter)
            if not (torch.isfinite(low) and torch.isfinite(high)):
                hint = "the file is damaged, or the weights do not fit into this dtype"
                raise ModelError(f"weight {name} is not finite", where=str(layout.path), hint=hint)
