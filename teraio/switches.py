"""Switches that turn a feature of the run off, to find by halving which of them is at fault.

    TERAIO_WITHOUT=prefetch,quiet_calls python train.py

The numbers are the same without any of them. What a run costs is not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from teraio.errors import OptionError
from teraio.formats.fields import suggest_nearest_name
from teraio.units import printable_line

VARIABLE = "TERAIO_WITHOUT"
FEATURES = {
    "slots": "a compiled program has one slot, so nothing moves while it runs",
    "quiet_calls": "every slot looks at its tensors, also in calls in which nothing has to move",
    "prefetch": "what user code reads between programs is fetched when it is read, not ahead",
    "early_gradients": "gradients stay resident until their backward has returned",
    "results": "what a program returns stays resident while anyone holds it",
    "buckets": "an optimizer steps all of its parameters at once",
}


def disabled_features(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return the features that the environment turns off."""
    asked = (os.environ if environ is None else environ).get(VARIABLE, "")
    names = [name.strip().lower() for name in asked.split(",") if name.strip()]
    for name in names:
        if name not in FEATURES:
            guess = suggest_nearest_name(name, list(FEATURES))
            raise OptionError(
                f"{VARIABLE}: '{printable_line(name)}' is not a feature{guess}; they are "
                f"{', '.join(FEATURES)}"
            )
    return frozenset(names)
