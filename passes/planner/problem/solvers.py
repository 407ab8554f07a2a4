"""OR-Tools, where it is installed. Without it plans are greedy's and the search's, and bounds simple ones."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module

log = logging.getLogger("teraio")


@cache
def is_ortools_installed() -> bool:
    """Imported here for the first time: planning is what it is for. Says once if it is not there."""
    try:
        import_module("ortools")
    except ImportError as error:
        log.warning(
            "teraio: plans are made without OR-Tools (%s): they are found by search alone, and how far they "
            "are from the best possible ones is known but roughly. Install it: pip install ortools",
            error,
        )
        return False
    return True
