"""An adapter folder as a folder of its own: without the run around it, and under another name of its base if asked.

The boundary: files; tensors are copied as they are. Read as untrusted input, written whole or not at all.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from muxtune.durable import staged_folder, write_text
from muxtune.errors import AdapterError
from muxtune.peft.card import card
from muxtune.peft.folder import (
    CARD_FILE,
    CONFIG_FILE,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    carried_files,
    check_public_name,
    read_config,
    read_manifest,
    require_free,
    writing,
)
from muxtune.peft.untrusted import SafetensorsFile


def copy_adapter(folder: Path, dest: Path, *, base_name: str | None = None) -> None:
    """Copy the adapter in `folder` to the new folder `dest`; `base_name` is what its config shall call its base.

    Raises:
        AdapterError: no adapter there, or one that is damaged or unsafe; `dest` holds something or cannot be written;
            the name is a path.
    """
    with writing(dest):
        require_free(dest)
    config, manifest = dict(read_config(folder)), read_manifest(folder)
    with SafetensorsFile(folder / WEIGHTS_FILE):
        pass  # a header that describes exactly its bytes
    own = [folder / name for name in (MANIFEST_FILE, CARD_FILE) if (folder / name).is_file()]
    contents: dict[str, bytes] = {}
    for file in (folder / CONFIG_FILE, folder / WEIGHTS_FILE, *own, *carried_files(folder)):
        if file.is_symlink():
            raise AdapterError("a symbolic link", where=str(file), hint="copy the file itself into the folder")
        contents[file.name] = file.read_bytes()
    with writing(dest), staged_folder(dest, key_file=CONFIG_FILE) as staging:
        for name, content in contents.items():
            (staging / name).write_bytes(content)
        if base_name is None:
            return
        check_public_name(base_name)
        config["base_model_name_or_path"] = base_name
        write_text(staging / CONFIG_FILE, _json(config))
        if manifest is not None:
            renamed = replace(manifest, base=replace(manifest.base, name=base_name))
            write_text(staging / MANIFEST_FILE, _json(renamed.to_json()))
            write_text(staging / CARD_FILE, card(config, renamed))


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
