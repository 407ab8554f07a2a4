"""Errors of ours that pass through Dynamo to the user."""

from __future__ import annotations

import sys
from typing import NoReturn

from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback

from teraio.errors import TeraioError


def raise_as_it_is(error: TeraioError) -> NoReturn:
    """Dynamo wraps what is raised while it compiles in an exception of its own, unless it is such a one
    already: then the user gets it, without Dynamo's frames. So the error becomes both; its name and its
    message stay."""
    kind = type(error)
    as_it_was = {"__str__": lambda self: str(error), "__reduce__": lambda self: error.__reduce__()}
    both = type(kind.__name__, (kind, BackendCompilerFailed), {**as_it_was, "__module__": kind.__module__})
    raised = both.__new__(both, *error.args)
    ShortenTraceback.__init__(raised, *error.args, first_useful_frame=sys._getframe())
    raised.backend_name, raised.inner_exception = "teraio", error
    raised.__dict__.update(error.__dict__)
    raise raised.with_traceback(error.__traceback__) from error.__cause__
