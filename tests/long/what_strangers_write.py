"""A run of models and training loops of other projects, drawn by a seed. The script compares each model and
loop with a training without teraio.

    python tests/long/what_strangers_write.py [--family hugging_face] [--names ...] [--count 100]

Each run of a case has its own process. One run has no budget, and another run has the smallest budget. All
bits of losses, weights and states must be equal. The peak must also be near the smallest budget. If the
smallest budget is far above the peak, the budget was computed wrongly, and the outcome is `loose`.

Every fifth case runs on Inductor. The script adds each result to a file, and a later run continues from that
file. The script exits with 1 if a case fails. A case takes some 20 s, and minutes on Inductor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from says import as_it_is, exactly

CHILD = Path(__file__).resolve().parents[1] / "support/strangers/child.py"
FAMILIES = ("hugging_face", "vision", "loops")
OUTCOMES = ("equal", "idle", "loose", "refused", "wrong", "crashed", "expected", "slow", "unusable")
COUNTS = {"hugging_face": 100, "vision": 30, "loops": 1000}
LIMITS_S = {"eager": 150, "inductor": 480}
TAIL_LINES = 30
# A smallest budget is `loose` if it exceeds a limit. The limit is the run's peak times the first number, plus
# the second number in bytes.
LOOSE = (1.2, 1 << 20)
TRIES_PER_CASE = 3  # cases drawn per requested case, before the script gives up

Result = dict[str, Any]


class Listener:
    """A process that forks for each run of a case. All cases are of one family."""

    def __init__(self, family: str, folder: Path) -> None:
        self.log = folder / f"{family}.log"
        command = [sys.executable, str(CHILD), family, "listen"]
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def run(self, name: str, mode: str, inner: str) -> Result:
        assert self.child.stdin is not None and self.child.stdout is not None
        request = {"name": name, "mode": mode, "inner": inner, "log": str(self.log)}
        self.child.stdin.write(json.dumps({**request, "limit_s": LIMITS_S[inner]}) + "\n")
        self.child.stdin.flush()
        answered = self.child.stdout.readline()
        if not answered:
            raise SystemExit(f"{name}: the process that runs the cases ended with {self.child.wait()}")
        result: Result = json.loads(answered)
        lines = self.log.read_text(errors="replace").splitlines()
        result["slow"] = result["exit"] == 1 and any(line.startswith("Timeout (") for line in lines)
        result["tail"] = lines[-TAIL_LINES:]
        return result

    def end(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait()


# ---- one case


def ended_badly(result: Result) -> str:
    """Return how the run failed: the error, the exit code or "slow". Return an empty string if the run ended
    well.
    """
    if result["slow"]:
        return "slow"
    if result["exit"]:
        return f"exit code {result['exit']}"
    return "" if result["state"] == "done" else str(result["error"])


def compared(plain: Result, budget: Result) -> tuple[str, str]:
    """Compare two runs of a case: `plain`, which has ended well, and `budget`. Return the outcome and a
    message."""
    if budget["slow"]:
        return "slow", ""
    fault = ended_badly(budget)
    if fault:
        return ("refused" if budget.get("state") == "refused" else "crashed"), fault
    if budget["digest"] != plain["digest"]:
        pairs = zip(plain["losses"], budget["losses"])
        first = next((step for step, (one, other) in enumerate(pairs, 1) if one != other), None)
        return (
            "wrong",
            f"losses differ from step {first} on" if first else "losses are equal, other bits differ",
        )
    if not (stats := budget["stats"]):
        return "idle", ""
    times, more = LOOSE
    taken = stats["peak_bytes"] + stats["user_code_bytes"]
    if stats["budget_bytes"] > times * taken + more:
        return "loose", f"of {stats['budget_bytes']} bytes the run took {taken}"
    return "equal", ""


def judged(listener: Listener, name: str, inner: str) -> Result:
    began = time.perf_counter()
    result: Result = {"name": name, "inner": inner, **outcome_of(listener, name, inner)}
    result["seconds"] = round(time.perf_counter() - began, 1)
    return result


def outcome_of(listener: Listener, name: str, inner: str) -> Result:
    """Return the outcome of a case.

    The first run is uncompiled. It takes a second and shows whether the case can be used. The second run is
    compiled and has a budget. In most cases its bits equal the bits of the first run. If the bits differ or
    the second run fails, a run that is compiled without an engine takes the place of the first run.
    """
    plain = listener.run(name, "uncompiled", inner)
    if fault := ended_badly(plain):
        return unusable(plain, fault)
    budget = listener.run(name, "budget", inner)
    outcome, message = compared(plain, budget)
    if outcome not in {"equal", "idle", "loose", "slow"}:
        plain = listener.run(name, "plain", inner)
        if fault := ended_badly(plain):
            return unusable(plain, fault)
        outcome, message = compared(plain, budget)
    if outcome == "wrong" and listener.run(name, "plain", inner).get("digest") != plain["digest"]:
        outcome, message = "unusable", "two plain runs differ"
    if outcome in {"refused", "crashed"} and plain["reason"]:
        outcome, message = "expected", f"{plain['reason']}: {message}"
    kept: Result = {key: budget[key] for key in ("losses", "stats", "warned", "reason") if key in budget}
    tail: Result = {} if outcome in {"equal", "idle", "loose"} else {"tail": budget["tail"]}
    return {"outcome": outcome, "message": message, **kept, "plain_losses": plain["losses"], **tail}


def unusable(plain: Result, fault: str) -> Result:
    outcome = "slow" if plain["slow"] else "unusable"
    return {"outcome": outcome, "message": f"without teraio: {fault}", "tail": plain["tail"]}


# ---- a family


class Kept:
    """The results so far, and their file. After each added result, the file is complete on the disk."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.results: list[Result] = json.loads(path.read_text()) if path and path.exists() else []

    def of(self, family: str, name: str, inner: str) -> Result | None:
        keys = {"family": family, "name": name, "inner": inner}
        return next((each for each in self.results if keys.items() <= each.items()), None)

    def add(self, family: str, result: Result) -> None:
        old = self.of(family, result["name"], result["inner"])
        self.results = [each for each in self.results if each is not old] + [{"family": family, **result}]
        if self.path:
            written = self.path.with_suffix(".part")
            written.write_text(json.dumps(self.results, indent=1))
            written.replace(self.path)


def drawn(family: str, seed: int) -> list[str]:
    command = [sys.executable, str(CHILD), family, "list", str(seed)]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        raise SystemExit(f"{family} cannot be listed:\n{listed.stderr}")
    found: list[str] = json.loads(listed.stdout.splitlines()[-1])
    return found


def sweep(family: str, args: argparse.Namespace, kept: Kept, folder: Path) -> list[Result]:
    """Run cases in the order of the draw, until the number of usable cases is large enough."""
    names = args.names or drawn(family, args.seed)
    count = len(names) if args.names else args.count or COUNTS[family]
    listener = Listener(family, folder)
    done: list[Result] = []
    for index, name in enumerate(names[: count * TRIES_PER_CASE]):
        on_inductor = args.inductor_every and index % args.inductor_every == args.inductor_every - 1
        inner = args.inner or ("inductor" if on_inductor else "eager")
        result = None if args.again else kept.of(family, name, inner)
        if result is None:
            result = judged(listener, name, inner)
            kept.add(family, result)
        done.append(result)
        summary = (
            f"{family} {name} {inner}: {result['outcome']} ({result['seconds']} s) {result['message'][:150]}"
        )
        print(" ".join(summary.split()), flush=True)
        if sum(each["outcome"] != "unusable" for each in done) >= count:
            break
    listener.end()
    return done


def table(results: dict[str, list[Result]]) -> None:
    print(f"{'':14}" + "".join(f"{outcome:>10}" for outcome in OUTCOMES))
    for family, done in results.items():
        counts = Counter(each["outcome"] for each in done)
        print(f"{family:14}" + "".join(f"{counts[outcome]:>10}" for outcome in OUTCOMES))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, action="append", help="default: all")
    parser.add_argument("--names", nargs="*", metavar="name", help="only these, of one family")
    parser.add_argument("--seed", type=int, default=2611)
    parser.add_argument("--count", type=int, default=0, help="usable cases per family, default: 100, 30, all")
    parser.add_argument("--inductor-every", type=int, default=5, help="0: none")
    parser.add_argument("--inner", choices=("eager", "inductor"), help="inner program of all cases")
    parser.add_argument("--results", type=Path, default=None, metavar="FILE.json")
    parser.add_argument("--again", action="store_true", help="also run cases that FILE.json contains")
    args = parser.parse_args()
    if args.names and len(args.family or FAMILIES) != 1:
        parser.error("--names needs exactly one --family")
    kept = Kept(args.results)
    with tempfile.TemporaryDirectory(prefix="teraio-strangers-") as folder:
        results = {family: sweep(family, args, kept, Path(folder)) for family in args.family or FAMILIES}
    table(results)
    counts = Counter(each["outcome"] for done in results.values() for each in done)
    as_it_is("strangers-equal", counts["equal"])
    as_it_is("strangers-refused", counts["refused"])
    loose = exactly("strangers-loose", counts["loose"])
    wrong = exactly("strangers-wrong", counts["wrong"])
    crashed = exactly("strangers-crashed", counts["crashed"])
    return 0 if loose and wrong and crashed else 1


if __name__ == "__main__":
    sys.exit(main())
