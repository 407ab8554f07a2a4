"""Scripts that other people wrote, under `teraio run`: the same numbers within a part of their peak.

    python tests/long/unchanged_scripts.py -- train.py config/train_shakespeare_char.py --device=cpu
    python tests/long/unchanged_scripts.py --file out/model.safetensors -- -m trl.scripts.sft ...

The script runs the command four times: plainly; with TERAIO_DISABLE=1; with all memory, which gives the peak;
and within a part of this peak. It compares the numbers in the lines of the output that match `--lines`. It
also compares the newest file that matches `--file`: the tensors of a checkpoint of torch, the bytes of
another file. It prints one JSON object. The command runs in the current folder.

No script of other people is in this repository. The rows in benchmarks/results/ name each script, its
release, and the data that was used.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

END = re.compile(
    r"teraio: the run: (\d+ steps?.*); peak ([^;]+) of ([^;]+); wrote (.+) and read (.+); waited (.+)"
)
# Times and rates differ between runs, so they are removed before a comparison.
TIMES = "|".join(
    (
        r"time [0-9.]+ms",
        r"mfu [-0-9.]+%",
        r"'train_(runtime|samples_per_second|steps_per_second)': '[^']*'",
        r"[0-9.]+(it/s|s/it)",
    )
)


def run(
    command: list[str], given: argparse.Namespace, **variables: str
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Run the command. Return a row of figures, and the results to compare."""
    environ = {**os.environ, "TERAIO_CACHE_DIR": "off", **variables}
    began = time.monotonic()
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environ)
    row: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "code": done.returncode}
    text = done.stdout + done.stderr
    if done.returncode:
        row["end"] = text[-2000:]
    if found := END.search(text):
        row |= dict(zip(("steps", "peak", "budget", "written", "read", "waited"), found.groups()))
    row["lines"] = [line for line in text.splitlines() if line.startswith("teraio: ")]
    row["overruns"] = [line for line in text.splitlines() if "overrun" in line]
    kept = [re.sub(given.drop, "", line) for line in re.split("[\r\n]", text) if re.search(given.lines, line)]
    numbers = [re.findall(r"-?[0-9]+\.[0-9]+(?:e-?[0-9]+)?", line) for line in kept]
    row["numbers"] = sum(map(len, numbers))
    return row, {"numbers": numbers, "file": hash_of_weights(given.file) if given.file else ""}


def hash_of_weights(pattern: str) -> str:
    """Return a hash of the tensors in the newest file that matches, or of its bytes."""
    newest = max(glob.glob(pattern), key=os.path.getmtime)
    if not newest.endswith((".ckpt", ".pt", ".pth")):
        return hashlib.sha256(Path(newest).read_bytes()).hexdigest()
    # A checkpoint also holds paths and times, so only its tensors are compared.
    hashed = hashlib.sha256()
    leaves, _ = tree_flatten(torch.load(newest, map_location="cpu", weights_only=True))
    for tensor in leaves:
        if isinstance(tensor, torch.Tensor):
            hashed.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", default="loss", help="pattern of the lines whose numbers are compared")
    parser.add_argument("--drop", default=TIMES, help="pattern of text that differs between runs")
    parser.add_argument("--file", help="pattern of the file of the weights, which the script writes")
    parser.add_argument("--part", type=float, default=0.5, help="part of the peak that is the budget")
    parser.add_argument("--inner", default="eager", choices=("eager", "inductor"))
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    start = [sys.executable, "-m", "teraio", "run", "--inner", given.inner]
    rows, results = {}, {}
    rows["plain"], results["plain"] = run([sys.executable, *given.command], given)
    rows["disabled"], results["disabled"] = run([*start, *given.command], given, TERAIO_DISABLE="1")
    rows["full"], results["full"] = run([*start, *given.command], given)
    amount, unit = rows["full"]["peak"].split()
    budget = f"{float(amount) * given.part:.1f}{unit}"
    rows["part"], results["part"] = run([*start, "--memory", budget, *given.command], given)
    same = {name: result == results["disabled"] for name, result in results.items()}
    print(json.dumps({"command": given.command, "equal to disabled": same, **rows}, indent=1))
    if (
        not (same["full"] and same["part"])
        or not rows["part"]["numbers"]
        or any(r["code"] for r in rows.values())
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
