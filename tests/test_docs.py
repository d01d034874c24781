"""The documents name what there is: every key, every alias; and nothing they link to is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from annotated_types import Le

from muxtune.data.dataset import MAX_COPIES
from muxtune.data.lines import MAX_LINE_BYTES
from muxtune.spec.aliases import JOB_ALIASES, PACKING, PEFT_ALIASES, REFUSED, RUN_ALIASES
from muxtune.spec.dataset import Dataset, Validation
from muxtune.spec.job import JobSpec
from muxtune.spec.matrix import MAX_POINTS
from muxtune.spec.names import MAX_NAME
from muxtune.spec.peft import PEFT_SPECS, peft_family
from muxtune.spec.run import RunSpec
from muxtune.spec.yaml_tree import MAX_DEPTH, MAX_VALUES

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_every_key_and_alias_is_documented() -> None:
    text = (ROOT / "docs" / "config.md").read_text()
    named = set(re.findall(r"`([A-Za-z0-9_.]+)`", text))
    aliases = {alias.name for alias in (*RUN_ALIASES, *JOB_ALIASES, *PEFT_ALIASES)}
    expected = {*JobSpec.model_fields, *RunSpec.model_fields, *aliases, *PACKING, *REFUSED}
    assert expected - named == set()


def test_the_table_of_aliases_is_the_code_s() -> None:
    lines = set((ROOT / "docs" / "config.md").read_text().splitlines())
    rows = [f"| `{alias.name}` | `{alias.ours}` | {alias.tools} |" for alias in (*RUN_ALIASES, *JOB_ALIASES)]
    assert [row for row in rows if row not in lines] == []
    text = " ".join((ROOT / "docs" / "config.md").read_text().split())
    assert [alias.name for alias in PEFT_ALIASES if f"`{alias.name}` for `{alias.ours}`" not in text] == []


def test_every_type_is_documented_with_its_keys_and_its_rate() -> None:
    named = set(re.findall(r"`([A-Za-z0-9_.]+)`", (ROOT / "docs" / "config.md").read_text()))
    for spec in PEFT_SPECS.values():
        assert set(spec.model_fields) - named == set()
    rows = re.findall(r"^\| `(\w+)` .*\| (\S+) \|$", (ROOT / "docs" / "methods.md").read_text(), re.MULTILINE)
    assert {peft_family(name) for name, _ in rows} == set(PEFT_SPECS)
    assert [name for name, rate in rows if float(rate) != PEFT_SPECS[peft_family(name)].default_learning_rate] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", path.read_text())
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert not missing


def test_every_upper_bound_of_a_key_is_documented() -> None:
    """A bound that is met only as an error is a surprise."""
    text = (ROOT / "docs" / "config.md").read_text()
    rows = text[text.index("## Bounds") : text.index("## Names from other tools")].splitlines()
    specs = (JobSpec, RunSpec, Dataset, Validation, *PEFT_SPECS.values())
    bounds = {
        (key, str(int(mark.le)))
        for spec in specs
        for key, field in spec.model_fields.items()
        for mark in (*field.metadata, *(one for part in get_args(field.annotation) for one in _marks(part)))
        if isinstance(mark, Le)
    }
    assert len(bounds) >= 7, bounds
    assert [bound for bound in bounds if not any(f"`{bound[0]}`" in row and bound[1] in row for row in rows)] == []
    for number in (MAX_NAME, MAX_POINTS, MAX_VALUES, MAX_DEPTH, f"{MAX_COPIES:,}", f"{MAX_LINE_BYTES >> 20} MiB"):
        assert any(str(number) in row for row in rows), number


def _marks(part: object) -> list[object]:
    """The constraints of one side of a union, as pydantic keeps them."""
    return [mark for one in getattr(part, "__metadata__", ()) for mark in getattr(one, "metadata", [one])]
