"""A run of processes that train at the same time and share the store's directory and the plan cache.

Each process must get the numbers of plain training, even if another process is killed.

    python tests/long/together.py [--rounds 20] [--steps 100] [--dir /mnt/ssd] [--seed 1]

In each round three processes start together, and `kill -9` ends one of them at a random moment. The script
prints lines `name value target PASS|FAIL`, and exits with 1 if a line says FAIL.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from says import at_least, exactly
from store_rig import Left, disk_for

TRAINS = Path(__file__).resolve().parents[1] / "support" / "cache_train.py"
BESIDE = 3
# Upper limit in seconds for `alone_s`; a kill comes at most twice `alone_s` after the start.
LAST_KILL_S = 15.0


def started(root: Path, steps: int, **more: str) -> subprocess.Popen[str]:
    env = {**os.environ, "TERAIO_STORE": str(root / "store"), "TERAIO_CACHE_DIR": str(root / "plans"), **more}
    command = [sys.executable, str(TRAINS), str(steps)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rows(process: subprocess.Popen[str]) -> list[list[Any]]:
    out, problems = process.communicate(timeout=600)
    if process.returncode:
        print(problems[-2000:], file=sys.stderr)
        return []
    found: list[list[Any]] = json.loads(out.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    root = disk_for(args.dir, "together")
    (root / "store").mkdir(mode=0o700, exist_ok=True)
    chance, began = random.Random(args.seed), time.monotonic()
    expected = [row[0] for row in rows(started(root, args.steps, TERAIO_DISABLE="1"))]
    if not expected:
        return 1
    alone_s = min(LAST_KILL_S, time.monotonic() - began)
    figures = dict.fromkeys(("other-numbers", "named-bytes", "names-after-start", "held"), 0)
    killed = moved = 0
    for number in range(args.rounds):
        if number % 5 == 0:  # with an empty cache, each of the processes may make the plan
            shutil.rmtree(root / "plans", ignore_errors=True)
        victim, *others = [started(root, args.steps) for _ in range(BESIDE)]
        time.sleep(chance.uniform(0.3, 2 * alone_s))
        killed += victim.poll() is None
        victim.kill()
        victim.communicate()
        for process in others:
            found = rows(process)
            figures["other-numbers"] += [row[0] for row in found] != expected
            moved += sum(row[1] for row in found) > 0
        left = Left(root / "store")
        figures["named-bytes"] += left.named_bytes
        figures["names-after-start"] += left.names_after_start
        figures["held"] += len(left.owners)
    good = [at_least("together-killed", killed, 1)]
    good.append(exactly("together-trained-by-a-plan", moved, (BESIDE - 1) * args.rounds))
    good += [exactly(f"together-{name}", value) for name, value in figures.items()]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
