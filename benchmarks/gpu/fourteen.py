"""The whole GPU run, in fourteen minutes: correctness to the bit, budgets and speed.

    first     smoke -> stop if it fails
              side by side: probes; small models, compared to the bit; a memory cap; compile the large model
              alone on the card: the speed of the large model; torch's stream sanitizer
    second    failed jobs run again, with debug logs; if no job failed, the remaining speed jobs run

`first` and `second` are two commands of this script. All work is done in jobs (jobs.py). The script writes a
row when a job ends (rows.py). `first` leaves its state for `second` in the folder `--kept`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import trainings
from beginning import REHEARSAL
from jobs import Crew, Ended, Figures, Job, read
from rows import Book, compared, has, peak_of, run_row, speed_row, within

SIDE_BY_SIDE_SHARE = 0.5  # largest share of the time for jobs side by side; the rest is for speed
SHARES = (0.4, 0.25, 0.6)  # budgets of the speed jobs, as shares of the plain peak, most useful first
FREED_S = 4.0  # seconds until the driver has freed killed processes' memory
AGAIN_MOST = 4  # largest number of failed jobs that the second command runs again
AGAIN_LOG_BYTES = 2 * 2**20
OUT_OF_MEMORY = "out of memory"
BUDGET = "BudgetError"


class Conductor:
    """One command: its jobs, their results, and the summary printed at the end."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.ends_s = time.monotonic() + args.seconds
        self.args, self.kept = args, args.kept
        about: Figures = {"command": args.command, "rehearsal": REHEARSAL, "stale_wheel": args.stale}
        self.book = Book(args.out, args.command, about)
        logs = args.kept / "jobs"
        logs.mkdir(parents=True, exist_ok=True)
        self.crew = Crew(logs, self.on_end)
        self.ended: dict[str, Ended] = {}
        self.compared: set[str] = set()
        self.told: list[str] = []  # printed lines
        self.failed: list[str] = []  # names of failed jobs, in order
        self.asked_slots = False
        self.large = dict(trainings.LARGE)
        self.large_peak_bytes = 0
        self.speeds: list[str] = []

    # ---- when a job ends

    def on_end(self, ended: Ended) -> Iterable[Job]:
        """Write the job's rows immediately, and return follow-up jobs. An error in this code loses only the
        rows of this job.
        """
        try:
            return self.take_in(ended)
        except Exception:  # noqa: BLE001  the other jobs must run
            self.own_error(ended.job.name)
            return []

    def own_error(self, where: str) -> None:
        text = traceback.format_exc()[-3000:]
        self.say(f"{where}: FAILED in these scripts: {text.splitlines()[-1]}")
        self.book.write("error", {"name": where, "error": text})

    def take_in(self, ended: Ended) -> Iterable[Job]:
        job = ended.job
        self.ended[job.name] = ended
        if job.name == "nvidia-smi":
            self.book.write("nvidia-smi", {"code": ended.code, "said": ended.tail[-3000:]})
            return []
        if job.name == "smoke":
            self.book.on(ended.result.get("machine", {}))
            self.book.write("smoke", {"seconds": ended.seconds, "ended": ended.why, **ended.result})
            return []
        self.book.write("run", run_row(ended))
        self.book.keep_log(ended, AGAIN_LOG_BYTES if self.args.command == "second" else 24_000)
        self.tell(ended)
        self.compare()
        return self.more(ended)

    def tell(self, ended: Ended) -> None:
        """Print a line about the ended job. If the job failed, add its name to the failed jobs."""
        job, row = ended.job, run_row(ended)
        verdict = "ok" if ended.in_order else f"FAILED ({row.get('error') or ended.why}, code {ended.code})"
        if ended.why == "no time left":
            verdict = "not run: no time left"
        elif "not available" in ended.result:
            verdict = f"not available: {ended.result['not available'][:80]}"
        elif job.name == "cut plain":
            refused = has(ended, OUT_OF_MEMORY)
            verdict = (
                "ok: out of memory, as expected" if refused else f"FAILED: no out of memory, {ended.why}"
            )
            if not refused:
                self.failed.append(job.name)
        elif not ended.in_order or row["within"] is False:
            self.failed.append(job.name)
        if row["within"] is False:
            verdict += (
                f"; NOT WITHIN: {row['over_bytes'] / 2**20:.1f} MiB over {row['budget_bytes'] / 2**20:.1f}"
            )
        self.say(f"{job.name}: {verdict}; {row['steps']} steps in {ended.seconds} s")
        for bytes_, kind, kernel, index, what in ended.result.get("slots", [])[:5]:
            self.say(f"    {bytes_ / 2**20:.1f} MiB: {what} {kernel} ({kind}, slot {index})")

    def say(self, line: str) -> None:
        print(f"{self.args.seconds - (self.ends_s - time.monotonic()):6.1f} s  {line}", flush=True)
        self.told.append(line)

    def compare(self) -> None:
        """Compare every job whose reference runs have ended by now."""
        pairs = trainings.REFERENCES
        pairs = pairs | {trainings.with_more(name): beside for name, beside in pairs.items()}
        for name, (reference, twice) in pairs.items():
            complete = all(other in self.ended for other in (name, reference, twice) if other)
            if not complete or name in self.compared:
                continue
            self.compared.add(name)
            row = compared(self.ended[name], self.ended[reference], self.ended.get(twice))
            self.book.write("equal", row)
            verdict = {
                True: "EQUAL to the bit",
                False: "DIFFERS",
                None: f"not compared: {row.get('not compared')}",
            }
            if row.get("steps"):
                self.say(f"{name} and {reference}: {verdict[row['equal']]} ({row['steps']} steps)")
            if row["equal"] is False:  # the worst failure, so the first in the list
                self.failed.insert(0, name)

    def more(self, ended: Ended) -> list[Job]:
        """Return follow-up jobs. If the budget was too small, add a retry with a larger budget. If the job
        exceeded its budget, add a retry that records the memory of each slot. If the job was the probe of
        attention, add the first jobs of the large model.
        """
        job, found = ended.job, list[Job]()
        if has(ended, BUDGET) and not job.name.endswith(trainings.MORE):
            memory = job.asked["memory"] + trainings.MORE_BYTES
            found.append(trainings.again(job, trainings.with_more(job.name), memory=memory))
        if within(ended) is False and not self.asked_slots:
            self.asked_slots = True
            found.append(trainings.again(job, f"{job.name} slots", 90, slots=True))
        if job.name == "probe cudnn" and self.args.command == "first":
            usable = ended.in_order and "not available" not in ended.result
            self.large["attention"] = None if usable else "flash"
            found += trainings.compile_large(self.large)
        if job.name == "large compile plain":
            self.large_peak_bytes = peak_of(ended.result)
            if has(ended, OUT_OF_MEMORY):
                self.large["batch"] = max(1, self.large["batch"] // 2)
        return found

    # ---- the stages

    def smoke(self) -> bool:
        """Run the smoke test and return True if it passed. Otherwise no other job runs."""
        self.crew.run([Job("nvidia-smi", ("nvidia-smi",), 20, least_s=1)], self.ends_s)
        # Long, because the first import of torch reads gigabytes on a fresh machine.
        limit = 180 if REHEARSAL else 120
        self.crew.run([Job("smoke", (sys.executable, trainings.SMOKE), limit)], self.ends_s)
        ended = self.ended["smoke"]
        if ended.result.get("ok"):
            self.say(f"smoke: ok in {ended.seconds} s")
            if unmoved := ended.result.get("versions", {}).get("unmoved"):
                self.say(f"versions that writes do not move: {', '.join(unmoved)}: writes may be lost")
            return True
        self.say(f"smoke: FAILED ({ended.why}, code {ended.code}): nothing else is run")
        print(ended.tail[-5000:], flush=True)
        return False

    def side_by_side(self) -> None:
        left = self.ends_s - time.monotonic()
        ends_s = time.monotonic() + left * (0.75 if REHEARSAL else SIDE_BY_SIDE_SHARE)
        card = self.ended["smoke"].result["machine"]["card_free_bytes"] / trainings.GIB
        most = max(2, min(10, (os.cpu_count() or 2) * 5 // 8))
        jobs = [*trainings.probes(), *trainings.bits()]
        self.crew.run(jobs, ends_s, most, gib=card - 2)
        if any(ended.why == "past its limit" for ended in self.ended.values()):
            time.sleep(FREED_S)

    def speed(self, shares: Iterable[float], **options: Any) -> None:
        """Train the large model once for each share, one training after another. A training's budget is this
        share of the plain peak.
        """
        for share in shares:
            if not self.large_peak_bytes:
                self.say("large: no job, because the peak of plain training is unknown")
                return
            profile: Figures = {}
            if share == SHARES[0] and not options:  # keep one measured profile of the large model
                profile = {"profile": str(self.args.out / "large.profile.json.gz")}
            job = trainings.speed(self.large, self.large_peak_bytes, share, **options, **profile)
            if job.name in self.ended:
                continue
            self.crew.run([job], self.ends_s)
            for name in (job.name, trainings.with_more(job.name)):
                if name in self.ended:
                    self.tell_speed(self.ended[name])
            self.leave()

    def speed_plain(self) -> None:
        self.crew.run([trainings.speed_plain(self.large)], self.ends_s)
        ended = self.ended["large plain"]
        if has(ended, OUT_OF_MEMORY) and self.large["batch"] > 1:
            self.large["batch"] //= 2
            self.crew.run([trainings.speed_plain(self.large)], self.ends_s)
            ended = self.ended["large plain"]
        self.large_peak_bytes = peak_of(ended.result) or self.large_peak_bytes
        self.tell_speed(ended)

    def tell_speed(self, ended: Ended) -> None:
        row = speed_row(ended, self.ended.get("large plain"))
        self.book.write("speed", {**row, "asked": ended.job.asked})
        ratios = " ".join(
            f"{name}={row[name]}" for name in ("over_plain", "over_bound", "over_predicted") if row.get(name)
        )
        self.say(f"speed {ended.job.name}: {row['step_s']} s per step; {ratios}")
        if row["step_s"]:
            self.speeds.append(ended.job.name)

    # ---- the two commands

    def first(self) -> int:
        if not self.smoke():
            return 3
        self.stages(
            self.side_by_side,
            self.leave,
            self.speed_plain,
            lambda: self.speed(SHARES),
            lambda: self.crew.run([trainings.sanitizer()], self.ends_s),
            self.leave,
        )
        return 0

    def stages(self, *stages: Callable[[], None]) -> None:
        """Run the stages in order. If a stage fails, run the next stage anyway."""
        for stage in stages:
            try:
                stage()
            except Exception:  # noqa: BLE001  the next must run
                self.own_error("a stage")

    def second(self) -> int:
        state = read(self.kept / "left.json")
        self.book.on(state.get("machine", {}))
        self.large = state.get("large", self.large)
        self.large_peak_bytes = state.get("large_peak_bytes", 0)
        if plain := state.get("large_plain"):
            self.ended["large plain"] = Ended(trainings.speed_plain(self.large), 0, 0.0, "ended", plain)
        jobs = [
            trainings.trained(f"again {name}", settings, 55, gib, environment={"TERAIO_LOG": "debug"})
            for name, settings, gib in state.get("failed", [])[:AGAIN_MOST]
        ]
        self.say(
            f"{len(jobs)} of the first command's jobs again; large peak {self.large_peak_bytes >> 20} MiB"
        )
        self.crew.run(jobs, min(self.ends_s, time.monotonic() + 60 if jobs else self.ends_s), most=4)
        if not self.large_peak_bytes:
            self.stages(self.speed_plain)
        if "large 60%" not in state.get("speeds", []):
            self.stages(lambda: self.speed((0.6,)))
        self.stages(lambda: self.speed((0.4,), optimizer_step="host"))
        return 0

    def leave(self) -> None:
        """Write the state that the second command needs."""
        failed = [self.ended[name].job for name in dict.fromkeys(self.failed)]
        state = {
            "failed": [(job.name, job.asked, job.gib) for job in failed],
            "speeds": self.speeds,
            "large": self.large,
            "large_peak_bytes": self.large_peak_bytes,
            "large_plain": self.ended["large plain"].result if "large plain" in self.ended else {},
            "machine": self.ended["smoke"].result.get("machine", {}) if "smoke" in self.ended else {},
        }
        (self.kept / "left.json").write_text(json.dumps(state))

    def stop(self, number: int, frame: FrameType | None) -> None:
        self.crew.stop_all()
        self.book.write("stopped", {"signal": number})
        os._exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=("first", "second"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kept", type=Path, required=True, help="folder of the state between the commands")
    parser.add_argument("--seconds", type=float, required=True, help="time limit of the whole command")
    parser.add_argument("--stale", action="store_true", help="the wheel was not built from this tree")
    args = parser.parse_args()
    conductor = Conductor(args)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, conductor.stop)
    try:
        code = conductor.first() if args.command == "first" else conductor.second()
    finally:
        conductor.crew.stop_all()
    summary = [
        line for line in conductor.told if "FAILED" in line or "DIFFERS" in line or "NOT WITHIN" in line
    ]
    print("\n".join(["", f"{len(summary)} failures:", *summary]), flush=True)
    conductor.book.write("end", {"wrong": summary, "code": code})
    return code


if __name__ == "__main__":
    sys.exit(main())
