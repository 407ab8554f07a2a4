"""What people do to a model in training: hooks, copies, pickles, `state_dict` and back, `.to()`, workers
that are forked or started, checkpoints, errors in the middle: each the same as without a budget.

    python tests/long/what_people_do.py

Counts the cases of the suites below; prints `name value target PASS|FAIL`, exit code 0 or 1.
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
