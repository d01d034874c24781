"""Calls into transformers that read a model: without its bars and reports, and with its errors as ours.

The boundary: output and errors only. What the reports would say (missing or unused tensors) the callers check
themselves and raise; a bar would tear the live table. transformers raises whatever its parts raise when a config or a
file is not what it expects, so the one list of those types is here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers.utils import logging as transformers_logging

from muxtune.errors import ModelError

_ERRORS = (StrictDataclassError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError, OSError)


@contextmanager
def reading(what: str, where: Path) -> Iterator[None]:
    """Within: no bars, only errors of transformers' logger; an exception of a bad input leaves as a ModelError."""
    bars = transformers_logging.is_progress_bar_enabled()
    logger = logging.getLogger("transformers")
    level = logger.level
    transformers_logging.disable_progress_bar()
    logger.setLevel(logging.ERROR)
    try:
        yield
    except ModelError:
        raise
    except ImportError as error:
        hint = "for GGUF files: pip install 'muxtune[embedded]'"
        raise ModelError(f"reading it needs a package: {error}", where=str(where), hint=hint) from error
    except _ERRORS as error:
        raise ModelError(f"transformers cannot use {what}: {error}", where=str(where)) from error
    finally:
        logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
