"""The native parts under sanitizers: the transfer engine from many threads with faults, under the ones for
races, addresses and undefined behaviour; the planner under random and hostile steps, under the latter two;
the observer in a process of Python's that trains and reads, under all three.

    python tests/long/sanitizers.py [--rounds 2000] [--instances 1000000] [--dir /mnt/ssd] [--build FOLDER]

Compiles csrc's stress programs, which know no Python, once per sanitizer; `--build` keeps that. The observer
alone of its process is compiled with the sanitizer, whose library is loaded first. Prints `name value target
PASS|FAIL`; exit code 0 or 1.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from says import exactly

CSRC = Path(__file__).resolve().parents[2] / "csrc"
RACES, MEMORY = "thread", "address,undefined"
LIBRARIES = {RACES: ["tsan"], MEMORY: ["asan", "ubsan"]}
CHILD = Path(__file__).resolve().parents[1] / "support" / "observer_child.py"
THREADED = ("threads_and_finalizers", "pointers_at_once")
ALONE = ("extension", "pointer_writes", "waits_for_us", "modes_are_restored", "arguments_stay", "store_fails")
REPORT = re.compile(r"WARNING: ThreadSanitizer|ERROR: \w+Sanitizer|runtime error:")
HANGS_S = 7200


def built(sanitizer: str, folder: Path) -> Path:
    place = folder / sanitizer.replace(",", "-")
    options = ["-DTERAIO_STRESS=ON", f"-DTERAIO_SANITIZE={sanitizer}"]
    for command in (
        ["cmake", "-S", str(CSRC), "-B", str(place), *options],
        ["cmake", "--build", str(place), "-j", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)}: {(done.stdout + done.stderr)[-2000:]}")
    return place


def observed(name: str, sanitizer: str, folder: Path, cases: Sequence[str]) -> bool:
    """The observer in these cases of `observer_child.py`."""
    made = folder / f"observer-{name}"
    made.mkdir(mode=0o700, exist_ok=True)
    found = [
        subprocess.run(["g++", f"-print-file-name=lib{each}.so"], capture_output=True, text=True, check=True)
        for each in LIBRARIES[sanitizer]
    ]
    environment = {
        "LD_PRELOAD": ":".join(done.stdout.strip() for done in found),
        "CXX": f"g++ -fsanitize={sanitizer} -fno-omit-frame-pointer -g",
        "READER_FOLDER": str(made),
        "TERAIO_CACHE_DIR": str(made),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's are not ours
        # The handler of faults is one by design; and glibc frees what a thread that has ended had as its own.
        "TSAN_OPTIONS": f"report_signal_unsafe=0 suppressions={made}/suppressions",
    }
    (made / "suppressions").write_text("race:_dl_deallocate_tls\n")
    return passed(f"observer-{name}", [sys.executable, CHILD, *cases], environment)


def passed(name: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> bool:
    """Neither a report nor a wrong byte."""
    # Threads that the kernel maps high are unknown to older runtimes without this.
    quiet = ["setarch", "-R"] if os.path.exists("/usr/bin/setarch") else []
    done = subprocess.run(
        [*quiet, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS_S,
        env={**os.environ, **(environment or {})},
    )
    reports = len(REPORT.findall(done.stderr))
    for line in (done.stdout + done.stderr[-3000 * bool(reports or done.returncode) :]).splitlines():
        print(f"    {line}")
    good = exactly(f"sanitizers-{name}-reports", reports)
    return exactly(f"sanitizers-{name}-exit", done.returncode) and good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2000, help="of each of six threads")
    parser.add_argument("--instances", type=int, default=10**6, help="steps for the planner")
    parser.add_argument("--dir", type=Path, help="where the engine's files are")
    parser.add_argument("--build", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sanitizers-", dir=args.dir) as folder:
        place = args.build or Path(folder)
        races, memory = built(RACES, place), built(MEMORY, place)
        rounds = str(args.rounds)
        good = [
            passed("engine-races", [races / "stress", folder, rounds]),
            passed("engine-memory", [memory / "stress", folder, rounds]),
            passed("planner-memory", [memory / "plan_stress", str(args.instances)]),
            observed("races", RACES, place, THREADED),
            observed("memory", MEMORY, place, (*THREADED, *ALONE)),
        ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
