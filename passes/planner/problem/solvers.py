"""A check whether OR-Tools is installed. Without OR-Tools, the integer programs are left out, and the bound
is only the simple one.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module

log = logging.getLogger("teraio")


@cache
def is_ortools_installed() -> bool:
    """Import OR-Tools, and return True if it is installed. Otherwise log a warning, once per process.

    A process that never plans does not call this function, and so saves the time of the import.
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
