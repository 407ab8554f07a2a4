"""Runs teraio's CUDA path on the real CUDA build of torch, without a GPU.

    python tests/cuda_without_gpu/prove.py                a sample, ten minutes on two idle cores
    python tests/cuda_without_gpu/prove.py --all          everything
    python tests/cuda_without_gpu/prove.py NAME ...       these, by the beginnings of their names
    python tests/cuda_without_gpu/prove.py --list

The first run makes the environment: about 5 GB, some minutes. Each check is a process of its own; two run at
once, except those that measure durations. What one found is a row of --out; the exit code tells whether all
held. Nothing here is a result of a GPU.
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
RUNNING: set[subprocess.Popen[str]] = set()  # each a session of its own


Known = dict[str, dict[str, Any]]


def run_check(
    made: environment.Environment, name: str, cache: Path, variables: dict[str, str]
) -> dict[str, Any]:
    """Its row: what it found, or what became of it."""
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
            told, _ = child.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            told, _ = child.communicate()
        RUNNING.remove(child)
        output.seek(0)
        said = output.read()
    row: dict[str, Any] = {"name": name, "seconds": round(time.monotonic() - began, 1)}
    lines = [line for line in told.splitlines() if line.startswith("{")]
    if child.returncode == 0 and lines:
        return {**row, "held": True, "found": json.loads(lines[-1])}
    return {**row, "held": False, "exit": child.returncode, "output": said[-OUTPUT_CHARACTERS:]}


def all_checks(made: environment.Environment) -> Known:
    """Of each check: whether it is in the sample, must run alone, and what is to be set for it."""
    command = [str(made.python), str(environment.HERE / "check.py"), "--list"]
    told = subprocess.run(command, capture_output=True, text=True, env=made.variables(), check=False)
    if told.returncode != 0:
        raise environment.SetUpError(told.stderr[-OUTPUT_CHARACTERS:])
    found: Known = json.loads(told.stdout.splitlines()[-1])
    return found


def chosen(known: Known, asked: argparse.Namespace) -> Known:
    if asked.names:
        return {name: about for name, about in known.items() if name.startswith(tuple(asked.names))}
    return {name: about for name, about in known.items() if about["sample"] or asked.all}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--at-once", type=int, default=min(2, os.cpu_count() or 1), help="how many run")
    parser.add_argument("--out", type=Path, help="a JSON file for the rows")
    parser.add_argument("--venv", type=Path, help="an environment that has torch already")
    asked = parser.parse_args()
    try:
        made = environment.make(asked.venv)
        known = all_checks(made)
    except environment.SetUpError as error:
        print(f"the stand-in's environment could not be made: {error}", file=sys.stderr)
        return 2
    if asked.list:
        print("\n".join(f"{name}{'' if about['sample'] else '  (--all)'}" for name, about in known.items()))
        return 0
    return run_all(made, chosen(known, asked), asked.out, asked.at_once)


def rows_of(made: environment.Environment, checks: Known, at_once: int) -> Generator[dict[str, Any]]:
    """Run the checks; those that must run alone are the last."""
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
                finally:  # after Ctrl-C, too
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
