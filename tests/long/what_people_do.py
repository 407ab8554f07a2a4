"""A run of test suites about the things that people do to a model in training. Each of these things must give
the same numbers with a budget and without a budget.

The script covers hooks, copies, pickles, saving and loading by `state_dict`, `.to()`, forked and spawned
workers, checkpoints, and errors during a step.

    python tests/long/what_people_do.py

The script runs test suites and counts their cases. The script prints lines `name value target PASS|FAIL`, and
exits with 1 if a line says FAIL.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from says import at_least, exactly

TESTS = Path(__file__).resolve().parents[1]
SUITES = (
    *("end_to_end/test_what_people_do", "runtime/eager/test_user_code", "runtime/model/test_resident"),
    *("runtime/model/test_save", "runtime/model/test_load", "session/test_reset"),
)
LEAST = 40


def main() -> int:
    tests = [str(TESTS / f"{suite}.py") for suite in SUITES]
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS.parent)
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    passed, failed = counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)
    if done.returncode:
        print((done.stdout + done.stderr)[-3000:], file=sys.stderr)
    good = at_least("what-people-do-same", passed, LEAST)
    good &= exactly("what-people-do-other", failed)
    return 0 if good and not done.returncode else 1


if __name__ == "__main__":
    sys.exit(main())
