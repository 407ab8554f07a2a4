"""A comparison of all planners on the shipped profiles and machines.

    python benchmarks/planner/side_by_side.py [-o FILE]

The script prints one row per case and planner. A row has the predicted step, the bound, the bytes written and
the seconds of planning. If the planner finds no plan, the row has the reason. Steps are predictions, and the
profiles come from a roofline model. Nothing is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import os
import platform
from pathlib import Path
from typing import Any

from teraio.cli import main as cli

FOLDER = Path(__file__).resolve().parents[2] / "profiles"

# (profile, machine, memory), from slight memory pressure to cases where every plan makes compute wait.
CASES = (
    ("gpt2-b16", "rtx4090-1ssd", "5GiB"),
    ("vit-b-16-b256", "rtx4090-1ssd", "10GiB"),
    ("llama-3.1-8b-l8-b4", "h100-4ssd", "45GiB"),
    ("llama-3.1-8b-b4", "h100-4ssd", "80GiB"),
    ("llama-3.1-8b-b4", "h100-4ssd-nohost", "80GiB"),
    ("llama-3.1-8b-b16", "h100-8ssd", "80GiB"),
    ("llama-3.1-8b-b16-checkpoint", "h100-4ssd", "60GiB"),
    ("llama-3.1-8b-b1x4-fp32", "teraio-paper", "93GiB"),
    ("qwen3-8b-b4", "gh200-4ssd", "80GiB"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", help="write the rows to this file")
    args = parser.parse_args()
    rows = []
    for profile, machine, memory in CASES:
        row = compared(profile, machine, memory)
        rows.append({"profile": profile, "machine": machine, "memory": memory, **row})
        steps = {
            each["planner"]: f"{each['step_ns'] / 1e9:.3g} s" for each in row["planners"] if each["step_ns"]
        }
        print(f"{profile} on {machine} in {memory}: bound {row['bound_ns'] / 1e9:.3g} s, {steps}", flush=True)
    if args.output:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        where = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
        text = json.dumps({"date": date, "machine": where, "cases": rows}, indent=1)
        Path(args.output).write_text(text + "\n")


def compared(profile: str, machine: str, memory: str) -> Any:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        cli.main(
            [
                *("plan", str(FOLDER / f"{profile}.profile.json.gz"), "--planner", "all", "--json"),
                *("--machine", str(FOLDER / f"machines/{machine}.machine.json"), "--memory", memory),
            ]
        )
    return json.loads(printed.getvalue())


if __name__ == "__main__":
    main()
