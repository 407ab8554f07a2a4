"""OR-Tools, if it is installed. Without OR-Tools, greedy and search make the plans, and only the simple bound
is known."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module

log = logging.getLogger("teraio")


@cache
def is_ortools_installed() -> bool:
    """Return True if OR-Tools can be imported. Warn once per process if it cannot.

    The import happens here, so a process that never plans does not pay for it.
    """
    try:
        import_module("ortools")
    except ImportError as error:
        log.warning(
            "teraio: plans are made without OR-Tools (%s): the integer program is skipped, and the lower "
            "bound on the step time is only the simple one. Install it: pip install ortools",
            error,
        )
        return False
    return True
