"""A run of the native parts under sanitizers.

There are three sanitizers: for races, for addresses and for undefined behaviour. The transfer engine runs
with many threads and faults, under all three. The planner runs with random and hostile steps, under the
sanitizers for addresses and undefined behaviour. The observer runs under all three, in a Python process that
trains and reads weights.

    python tests/long/sanitizers.py [--rounds 2000] [--instances 1000000] [--dir /mnt/ssd] [--build FOLDER]

The script compiles csrc's stress programs, which contain no Python, one time per sanitizer. `--build` keeps
the compiled programs. In the Python process, only the observer is compiled with the sanitizer, and the
sanitizer's library is preloaded. The script prints lines `name value target PASS|FAIL`, and exits with 1 if a
line says FAIL.
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
ALONE = (
    "extension",
    "pointer_writes",
    "waits_for_us",
    "modes_are_restored",
    "arguments_are_kept",
    "store_fails",
)
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
    """Run these cases of `observer_child.py` with the observer compiled under a sanitizer."""
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
        "ASAN_OPTIONS": "detect_leaks=0",  # leaks of Python itself must not fail the run
        # The fault handler makes signal-unsafe calls by design, so the report of such calls is disabled. When
        # glibc frees the thread-local memory of ended threads, the sanitizer reports a race. The suppressions
        # file hides this race.
        "TSAN_OPTIONS": f"report_signal_unsafe=0 suppressions={made}/suppressions",
    }
    (made / "suppressions").write_text("race:_dl_deallocate_tls\n")
    return passed(f"observer-{name}", [sys.executable, CHILD, *cases], environment)


def passed(name: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> bool:
    """Return True if the sanitizer reports nothing and the command exits with 0."""
    # Run without address randomization. Otherwise Linux maps threads at addresses that are too high for older
    # runtimes of the sanitizer.
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
    parser.add_argument("--rounds", type=int, default=2000, help="rounds of each of six threads")
    parser.add_argument("--instances", type=int, default=10**6, help="steps for the planner")
    parser.add_argument("--dir", type=Path, help="directory of the engine's files")
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
