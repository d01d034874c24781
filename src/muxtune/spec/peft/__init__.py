"""PEFT specs: which adapter a job trains, and what it costs, from attach points alone."""

from muxtune.spec.peft.base import PeftBase, Place
from muxtune.spec.peft.lora import Lora
from muxtune.spec.peft.union import PEFT_SPECS, PeftSpec, peft_family, read_peft

__all__ = ["PEFT_SPECS", "Lora", "PeftBase", "PeftSpec", "Place", "peft_family", "read_peft"]
