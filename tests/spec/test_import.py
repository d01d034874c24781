"""The public names, and that importing them stays light."""

from __future__ import annotations

import subprocess
import sys

import pytest

import muxtune
import muxtune.spec
from muxtune.spec.peft import PEFT_SPECS, read_peft


def test_public_names_exist() -> None:
    assert [name for name in muxtune.spec.__all__ if not hasattr(muxtune.spec, name)] == []
    assert len(set(muxtune.spec.__all__)) == len(muxtune.spec.__all__)


def test_importing_needs_no_torch() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'peft', 'rich', 'typer'}"
    program = f"import sys, muxtune.spec; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("LoRA", "did you mean muxtune.Lora?"),
        ("LORA", "did you mean muxtune.Lora?"),
        ("SHiRA", "did you mean muxtune.Shira?"),
        ("LNTuning", "did you mean muxtune.LnTuning?"),
        ("LoraConfig", "did you mean muxtune.Lora?"),
        ("Ia3", "did you mean muxtune.IA3?"),
        ("prefix_tuning", "did you mean muxtune.PrefixTuning?"),
        ("Optimizer", "it has IA3, BitFit, "),
        ("DoRA", "say muxtune.Lora(use_dora=True)"),
        ("PiSSA", 'say muxtune.Lora(init_lora_weights="pissa")'),
        ("Houlsby", 'say muxtune.Bottleneck(placement="houlsby")'),
    ],
)
def test_a_name_that_is_spelt_otherwise_is_told_the_right_one(name: str, told: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(muxtune, name)
    assert told in str(caught.value)
    if "say " in told:
        made = eval(told.removeprefix("say "), {"muxtune": muxtune})
        assert made == read_peft(name.lower())


def test_every_type_has_its_class_at_the_top() -> None:
    classes = {spec.__name__ for spec in PEFT_SPECS.values()}
    assert classes <= set(muxtune.__all__) and classes == {getattr(muxtune, name).__name__ for name in classes}
