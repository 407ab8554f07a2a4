"""Switches that turn off features of a run. With them, a user can find by bisection the feature that causes a
fault.

    TERAIO_WITHOUT=prefetch,quiet_calls python train.py

A switch may make a run slower or larger, but does not change the computed numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from teraio.errors import OptionError
from teraio.formats.fields import suggest_nearest_name
from teraio.units import printable_line

VARIABLE = "TERAIO_WITHOUT"
# Each feature -> the behaviour of a run without it.
FEATURES = {
    "slots": "a compiled program has one slot, so nothing moves while it runs",
    "quiet_calls": "every slot checks its tensors, even in calls in which nothing has to move",
    "prefetch": "a tensor that user code reads between programs is fetched on its read, not ahead",
    "early_gradients": "gradients are kept resident until their backward has returned",
    "gradient_calls": "norms and scalings of gradients by user code fetch the evicted gradients",
    "results": "results of a program are kept resident while anything references them",
    "buckets": "an optimizer steps all of its parameters at once",
}


def disabled_features(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return the features that the environment variable TERAIO_WITHOUT turns off."""
    listed = (os.environ if environ is None else environ).get(VARIABLE, "")
    names = [name.strip().lower() for name in listed.split(",") if name.strip()]
    for name in names:
        if name not in FEATURES:
            guess = suggest_nearest_name(name, list(FEATURES))
            raise OptionError(
                f"{VARIABLE}: '{printable_line(name)}' is not a feature{guess}; features are "
                f"{', '.join(FEATURES)}"
            )
    return frozenset(names)
