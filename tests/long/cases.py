"""The cases of the test suites that are marked `long`.

A plain run of the tests leaves these cases out, because each is similar to a case in the plain run.

    python tests/long/cases.py [options of pytest]

The script prints lines `name value target PASS|FAIL`, and exits with 1 if a line says FAIL.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from says import at_least, exactly

TESTS = Path(__file__).resolve().parents[1]
LEAST = 20


def main() -> int:
    # An empty `addopts` is needed, because the options in pyproject.toml would leave these cases out.
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", "-m", "long"]
    command += [str(TESTS), *sys.argv[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS.parent)
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    passed, failed = counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)
    if done.returncode:
        print((done.stdout + done.stderr)[-3000:], file=sys.stderr)
    good = at_least("cases-passed", passed, LEAST)
    good &= exactly("cases-failed", failed)
    return 0 if good and not done.returncode else 1


if __name__ == "__main__":
    sys.exit(main())
