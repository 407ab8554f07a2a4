"""A measurement of branch coverage: the share of branches in the engine and the file readers that the tests
take.

    python tests/long/branches.py [tests ...] [--jobs 2] [--report FILE] [--after FILE]

The script runs all tests, or only the tests given by name, and their child processes under coverage.py. For
each file, the script prints the share of taken branches and the lines of the missing branches. The file with
the smallest share is first. Then the script prints `name value target PASS|FAIL`. Branches that need a GPU
have their own row, because no test can take them without a GPU. The script needs `pip install coverage`.

A run of all tests takes an hour. The tests' time limits do not apply. To run in parts, pass the report of an
earlier run with `--after`. If a file has not changed since that run, the branches that this report lists as
taken also count.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from says import at_least

ROOT = Path(__file__).resolve().parents[2]
ENGINE_AND_READERS = ("runtime/", "teraio/formats/", "teraio/options.py", "teraio/units.py")
ON_A_GPU = (
    "runtime/device/cuda.py",
    "runtime/device/cuda_memory.py",
    "runtime/device/pinned_host.py",
    "runtime/store/gds.py",
)
LEAST_PERCENT = 95
# The branches that forked children take must count. These children end by os._exit, so coverage.py must patch
# `_exit`.
SETTINGS = """\
[run]
branch = true
parallel = true
concurrency = thread
patch = subprocess, _exit
data_file = {folder}/data
source = {root}/runtime, {root}/teraio
disable_warnings = no-data-collected, module-not-imported, module-not-measured
[report]
exclude_also =
    if TYPE_CHECKING:
    raise NotImplementedError
    ^\\s*\\.\\.\\.$
    assert_never
"""


@dataclass(frozen=True, slots=True)
class File:
    name: str
    taken: int
    branches: int
    # (from line, to line) of each missing branch; a negative line is the end of the function
    missing: tuple[tuple[int, int], ...]

    @property
    def percent(self) -> float:
        return 100 * self.taken / self.branches if self.branches else 100.0


def counted(name: str) -> bool:
    """Return True if this file belongs to the engine, or reads files that other programs wrote."""
    return name.startswith(ENGINE_AND_READERS)


def measured(tests: list[str], jobs: int) -> dict[str, Any]:
    """Run the tests under coverage.py and return its report."""
    with tempfile.TemporaryDirectory(prefix="branches-") as folder:
        settings, found = Path(folder) / "settings", Path(folder) / "found.json"
        settings.write_text(SETTINGS.format(folder=folder, root=ROOT))
        coverage = [sys.executable, "-m", "coverage"]
        how = ["-o", "addopts=", "-q", "--strict-markers", "-p", "no:cacheprovider"]
        how += ["-n", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder"] if jobs > 1 else []
        command = [*coverage, "run", f"--rcfile={settings}", "-m", "pytest", *how, *tests]
        subprocess.run(command, cwd=ROOT, check=False)  # pytest itself prints failed tests
        subprocess.run([*coverage, "combine", "-q", f"--rcfile={settings}"], cwd=ROOT, check=True)
        write = [*coverage, "json", "-q", f"--rcfile={settings}", "-o", str(found)]
        subprocess.run(write, cwd=ROOT, check=True)
        report: dict[str, Any] = json.loads(found.read_text())
    for path, file in report["files"].items():
        file["sha256"] = sha256_of(path)
    return report


def sha256_of(path: str) -> str:
    return hashlib.sha256((ROOT / path).read_bytes()).hexdigest()


def add(report: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Add to `report` the branches that the report `earlier` lists as taken. Leave out files that have
    changed since the earlier run.
    """
    for path, before in earlier["files"].items():
        file = report["files"].get(path)
        if file is None and before["sha256"] == sha256_of(path):
            report["files"][path] = before
        elif file is not None and file["sha256"] == before["sha256"]:
            still = {*map(tuple, file["missing_branches"])} & {*map(tuple, before["missing_branches"])}
            file["missing_branches"] = sorted(still)


def files_of(report: dict[str, Any]) -> list[File]:
    """Return the files of a report, sorted by their share of taken branches, the smallest share first."""
    return sorted(map(file_of, report["files"].items()), key=lambda file: file.percent)


def file_of(entry: tuple[str, dict[str, Any]]) -> File:
    path, report = entry
    name = os.path.relpath((ROOT / path).resolve(), ROOT)
    branches, missing = report["summary"]["num_branches"], tuple(map(tuple, report["missing_branches"]))
    return File(name, branches - len(missing), branches, missing)


def row(name: str, files: list[File], least: float) -> bool:
    """Print a row. Return False if the tests took less than `least` per cent of the branches."""
    taken, branches = sum(file.taken for file in files), sum(file.branches for file in files)
    percent = 100 * taken / max(branches, 1)
    return at_least(f"branches-{name}-percent", percent, least)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="*", help="files, folders or node ids; default: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--report", type=Path, help="file for the taken branches, as coverage's JSON")
    parser.add_argument("--after", type=Path, help="an earlier report, whose branches count, too")
    args = parser.parse_args()
    if importlib.util.find_spec("coverage") is None:
        print("this needs coverage.py: pip install coverage", file=sys.stderr)
        return 2
    earlier = json.loads(args.after.read_text()) if args.after else {"files": {}}
    report = measured(args.tests, args.jobs)
    add(report, earlier)
    if args.report:
        args.report.write_text(json.dumps(report))
    files = [file for file in files_of(report) if counted(file.name)]
    for file in files:
        lines = " ".join(f"{first}->{to}" if to > 0 else f"{first}->end" for first, to in file.missing[:12])
        print(f"{file.percent:6.1f} %  {file.taken:>4} of {file.branches:>4}  {file.name}  {lines}")
    without_gpu = [file for file in files if file.name not in ON_A_GPU]
    row("that-need-a-gpu", [file for file in files if file.name in ON_A_GPU], 0)
    return 0 if row("of-engine-and-readers", without_gpu, LEAST_PERCENT) else 1


if __name__ == "__main__":
    sys.exit(main())
