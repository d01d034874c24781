"""A cast of all PEFT types, in settings that differ, for tests that put them into one pass."""

from __future__ import annotations

from muxtune.spec.peft import IA3, BitFit, Bottleneck, LnTuning, Lora, PrefixTuning, PromptTuning, Shira
from tests.engine.prompts import PeftTrial
from tests.reference_types import MLP

ARCHS = ("llama", "gpt2", "opt")


def cast(arch: str) -> tuple[PeftTrial, ...]:
    """A task of each type that the family has a place for, two of LoRA; lengths down to one trained token."""
    made = [
        PeftTrial("lora", Lora(r=4), [3, 20, 7, 12], seed=1),
        PeftTrial("drop", Lora(r=3, lora_alpha=5, lora_dropout=0.3), [10, 31, 2], batch=1, seed=2, chunk_tokens=48),
        PeftTrial("rslora", Lora(r=8, use_rslora=True), [2, 2, 9], batch=3, weight_decay=0.1, seed=3),
        PeftTrial("dora", Lora(r=5, use_dora=True, lora_dropout=0.1), [8, 17, 4], batch=2, seed=4),
        PeftTrial("pissa", Lora(r=2, init_lora_weights="pissa"), [13, 6], batch=2, max_grad_norm=0.05, seed=5),
        PeftTrial("ia3", IA3(), [7, 19, 3], batch=3, seed=6),
        PeftTrial("houlsby", Bottleneck(placement="houlsby", bottleneck_size=5), [11, 2, 6], batch=2, seed=7),
        PeftTrial("pfeiffer", Bottleneck(non_linearity="gelu"), [15, 9], batch=2, seed=8),
        PeftTrial("bitfit", BitFit(), [5, 14, 3], batch=3, seed=9),
        PeftTrial("norms", LnTuning(), [16, 4, 22], batch=3, seed=10, chunk_tokens=24),
        PeftTrial("shira", Shira(r=2), [8, 21], batch=2, weight_decay=0.1, seed=11),
        PeftTrial("prefix", PrefixTuning(num_virtual_tokens=5), [4, 18, 2, 9], batch=2, seed=12),
        PeftTrial("prompt", PromptTuning(num_virtual_tokens=3), [6, 12, 2], batch=3, seed=13, chunk_tokens=32),
    ]
    if arch in MLP:
        made.append(
            PeftTrial("parallel", Bottleneck(placement="parallel", bottleneck_size=8), [7, 16], batch=2, seed=14)
        )
    return tuple(made)
