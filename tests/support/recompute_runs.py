"""Trainings of recompute_train.py in their own process."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import tree
from children import forked


def child(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of the runs by name, and the log."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        done = forked(tree.SUPPORT / "recompute_train.py", json.dumps(runs), env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    results["log"] = done.stderr
    return results
