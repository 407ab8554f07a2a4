"""Cases of the suites of tests that are marked `long`: each has one that is much like it among the others,
and a plain run of the tests leaves it out.

    python tests/long/cases.py [options of pytest]

Prints `name value target PASS|FAIL`; exit code 0 or 1.
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
    # Without the options of pyproject.toml, which leave these cases out.
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
