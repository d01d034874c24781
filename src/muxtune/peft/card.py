"""The model card of an adapter folder: what it is, what it was trained on, how to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from muxtune.data.manifest import JsonValue, TrainingManifest


def card(config: Mapping[str, JsonValue], manifest: TrainingManifest) -> str:
    """README.md with the front matter that model hubs read. Names are quoted: they are a user's text."""
    base = manifest.base
    own = str(config["peft_type"]).startswith("MUXTUNE_")
    data = "\n".join(f"- `{_plain(d.name)}`: {d.examples} examples, sha256 `{d.sha256}`" for d in manifest.datasets)
    return f"""---
base_model: {json.dumps(base.name)}
library_name: {"muxtune" if own else "peft"}
pipeline_tag: text-generation
tags: [{_plain(str(config["peft_type"]).lower())}, muxtune]
---

# {_plain(str(manifest.job.get("name", "adapter")))}

A {config["peft_type"]} adapter of `{_plain(base.name)}`, trained with MuxTune for {manifest.steps} steps (seed \
{manifest.seed}).

{_weights_line(manifest)}

```python
{_own_loading(base.name) if own else _peft_loading(base.name)}
```

Trained on:

{data or "- (no files recorded)"}

`training_manifest.json` has the whole configuration.
"""


def _peft_loading(base_name: str) -> str:
    return f"""from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "path/to/this/folder"
model = AutoModelForCausalLM.from_pretrained({json.dumps(base_name)})
model = PeftModel.from_pretrained(model, folder)
tokenizer = AutoTokenizer.from_pretrained(folder)"""


def _own_loading(base_name: str) -> str:
    """peft has no such type."""
    return f"""import muxtune

engine = muxtune.Engine({json.dumps(base_name)})
task = engine.load("path/to/this/folder")
print(engine.sample("...", task=task))"""


def _weights_line(manifest: TrainingManifest) -> str:
    base = manifest.base
    note = f" ({_plain(base.note)})" if base.note else ""
    sha = f", sha256 `{base.weights_sha256}`" if base.weights_sha256 else ""
    text = f"Base weights used: `{_plain(base.name)}`{note}{sha}."
    if base.note:
        text += " Other weights of that name give somewhat other outputs; `muxtune models export` writes exactly these."
    return text


def _plain(text: str) -> str:
    """One line without characters that mean something in Markdown or HTML."""
    return "".join(c for c in text if c.isprintable() and c not in "`<>[]|")
