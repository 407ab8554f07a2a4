"""A script that runs teraio's CUDA code with the real CUDA build of torch, without a GPU.

    python tests/cuda_without_gpu/prove.py                runs a sample: ten minutes on two idle cores
    python tests/cuda_without_gpu/prove.py --all          runs all checks
    python tests/cuda_without_gpu/prove.py NAME ...       runs the checks whose names begin with NAME
    python tests/cuda_without_gpu/prove.py --list

The first run makes the environment, which takes about 5 GB and some minutes. Each check runs in its own
process. Two checks run at the same time, but checks that measure durations run alone. Each check adds a row
to the file that --out names. The exit code is 0 if all checks passed. A row is not a result of a real GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import environment

LIMIT_S = 900
OUTPUT_CHARACTERS = 4_000
# Processes of running checks. Each has its own process group, so that its children can be killed, too.
RUNNING: set[subprocess.Popen[str]] = set()


Known = dict[str, dict[str, Any]]


def run_check(
    made: environment.Environment, name: str, cache: Path, variables: dict[str, str]
) -> dict[str, Any]:
    """Run a check in a new process. Return its row, with the check's figures or with its failure."""
    module, _, check = name.partition(".")
    command = [str(made.python), str(environment.HERE / "check.py"), module, check]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=made.variables(STANDIN_CACHE=str(cache), **variables),
            start_new_session=True,
        )
        RUNNING.add(child)
        try:
            answer, _ = child.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            answer, _ = child.communicate()
        RUNNING.remove(child)
        output.seek(0)
        log = output.read()
    row: dict[str, Any] = {"name": name, "seconds": round(time.monotonic() - began, 1)}
    lines = [line for line in answer.splitlines() if line.startswith("{")]
    if child.returncode == 0 and lines:
        return {**row, "held": True, "found": json.loads(lines[-1])}
    return {**row, "held": False, "exit": child.returncode, "output": log[-OUTPUT_CHARACTERS:]}


def all_checks(made: environment.Environment) -> Known:
    """Return three facts for each check: whether it is in the sample, whether it must run alone, and its
    environment variables.
    """
    command = [str(made.python), str(environment.HERE / "check.py"), "--list"]
    answer = subprocess.run(command, capture_output=True, text=True, env=made.variables(), check=False)
    if answer.returncode != 0:
        raise environment.SetUpError(answer.stderr[-OUTPUT_CHARACTERS:])
    found: Known = json.loads(answer.stdout.splitlines()[-1])
    return found


def chosen(known: Known, request: argparse.Namespace) -> Known:
    if request.names:
        return {name: about for name, about in known.items() if name.startswith(tuple(request.names))}
    return {name: about for name, about in known.items() if about["sample"] or request.all}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--at-once", type=int, default=min(2, os.cpu_count() or 1), help="parallel checks")
    parser.add_argument("--out", type=Path, help="a JSON file for the rows")
    parser.add_argument("--venv", type=Path, help="a virtual environment with torch")
    request = parser.parse_args()
    try:
        made = environment.make(request.venv)
        known = all_checks(made)
    except environment.SetUpError as error:
        print(f"the stand-in's environment could not be made: {error}", file=sys.stderr)
        return 2
    if request.list:
        print("\n".join(f"{name}{'' if about['sample'] else '  (--all)'}" for name, about in known.items()))
        return 0
    return run_all(made, chosen(known, request), request.out, request.at_once)


def rows_of(made: environment.Environment, checks: Known, at_once: int) -> Generator[dict[str, Any]]:
    """Run the checks, and yield the row of each check when it ends. The checks that must run alone run
    last.
    """
    with tempfile.TemporaryDirectory() as cache:
        for alone in (False, True):
            with ThreadPoolExecutor(1 if alone else at_once) as pool:
                runs = [
                    pool.submit(run_check, made, name, Path(cache), about["set"])
                    for name, about in checks.items()
                    if about["alone"] is alone
                ]
                try:
                    for run in as_completed(runs):
                        yield run.result()
                finally:  # also after Ctrl-C: kill all running checks
                    pool.shutdown(wait=False, cancel_futures=True)
                    for child in list(RUNNING):
                        os.killpg(child.pid, signal.SIGKILL)


def run_all(made: environment.Environment, checks: Known, out: Path | None, at_once: int) -> int:
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    with closing(rows_of(made, checks, at_once)) as found:
        for row in found:
            rows.append(row)
            print(
                f"{'held  ' if row['held'] else 'FAILED'} {row['seconds']:6.1f} s  {row['name']}", flush=True
            )
            print("        " + (json.dumps(row["found"]) if row["held"] else row["output"]), flush=True)
            if out is not None:
                head = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "on": "the stand-in"}
                out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    failed = [row["name"] for row in rows if not row["held"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} held, {time.monotonic() - began:.0f} s")
    print("\n".join(f"failed: {name}" for name in failed), end="\n" if failed else "")
    return int(bool(failed) or not rows)


if __name__ == "__main__":
    sys.exit(main())
