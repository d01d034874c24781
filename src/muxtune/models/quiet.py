"""Loads by transformers without its progress bars and reports.

The boundary: output only. What the reports would say (missing or unused tensors) the callers check themselves and
raise; a bar would tear the live table.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Within: no bars, and only errors of transformers' logger. Both are put back afterwards."""
    bars = transformers_logging.is_progress_bar_enabled()
    logger = logging.getLogger("transformers")
    level = logger.level
    transformers_logging.disable_progress_bar()
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
