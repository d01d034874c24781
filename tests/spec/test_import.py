"""The public names, and that importing them stays light."""

from __future__ import annotations

import subprocess
import sys

import muxtune.spec


def test_public_names_exist() -> None:
    assert [name for name in muxtune.spec.__all__ if not hasattr(muxtune.spec, name)] == []
    assert len(set(muxtune.spec.__all__)) == len(muxtune.spec.__all__)


def test_importing_needs_no_torch() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'peft', 'rich', 'typer'}"
    program = f"import sys, muxtune.spec; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
