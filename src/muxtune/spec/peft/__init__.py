"""PEFT specs: which adapter a job trains, and what it costs, from attach points alone."""

from muxtune.spec.peft.base import PeftBase, Place
from muxtune.spec.peft.bitfit import BitFit
from muxtune.spec.peft.bottleneck import Bottleneck
from muxtune.spec.peft.ia3 import IA3
from muxtune.spec.peft.ln_tuning import LnTuning
from muxtune.spec.peft.lora import Lora
from muxtune.spec.peft.prefix_tuning import PrefixTuning
from muxtune.spec.peft.prompt_tuning import PromptTuning
from muxtune.spec.peft.shira import Shira
from muxtune.spec.peft.union import PEFT_SPECS, PeftSpec, peft_family, read_peft, short_setting, type_name

__all__ = [
    "IA3",
    "PEFT_SPECS",
    "BitFit",
    "Bottleneck",
    "LnTuning",
    "Lora",
    "PeftBase",
    "PeftSpec",
    "Place",
    "PrefixTuning",
    "PromptTuning",
    "Shira",
    "peft_family",
    "read_peft",
    "short_setting",
    "type_name",
]
