"""Rows of results: one row per job and one per comparison. Each row is written to a file at once, as one
line.

Every row holds the date, the machine and the versions, so that a single line can be quoted.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from math import isnan
from pathlib import Path
from statistics import median

from beginning import REHEARSAL
from jobs import Ended, Figures

SAID_MOST = 25  # largest number of teraio's log lines in a row
LOG_BYTES, LOGS_BYTES = 24_000, 12 * 2**20  # limits for one failed job's log, and for all logs
NOTHING_DONE = "the stand-in's Triton kernels do nothing: numbers mean nothing"
VERSIONS = ("python", "torch", "triton", "cudnn", "teraio", "ortools")


class Book:
    """The rows and logs of one command, in two files."""

    def __init__(self, out: Path, name: str, about: Figures) -> None:
        self.rows, self.logs = out / f"{name}.jsonl", out / f"{name}.log"
        self.about, self.written_bytes = about, 0
        for path in (self.rows, self.logs):
            path.write_text("")

    def on(self, machine: Figures) -> None:
        """Record the card and the versions for all later rows."""
        self.about["card"] = machine.get("card")
        memory_gib = machine.get("memory_bytes", 0) >> 30
        self.about["machine"] = f"{machine.get('cores')} cores, {memory_gib} GiB, {machine.get('kernel')}"
        self.about["versions"] = {name: machine.get(name) for name in VERSIONS}

    def write(self, what: str, figures: Figures) -> None:
        """Write one row."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with self.rows.open("a") as rows:
            rows.write(json.dumps({"date": now, "what": what, **self.about, **figures}) + "\n")

    def keep_log(self, ended: Ended, size_bytes: int = LOG_BYTES) -> None:
        if ended.log is None or self.written_bytes > LOGS_BYTES:
            return
        with ended.log.open("rb") as log:
            log.seek(max(0, ended.log.stat().st_size - size_bytes))
            text = (
                f"\n==== {ended.job.name}: {ended.why}, code {ended.code}, {ended.seconds} s\n".encode()
                + log.read()
            )
        self.written_bytes += len(text)
        with self.logs.open("ab") as logs:
            logs.write(text)


# ---- figures of a training


def peak_of(result: Figures) -> int:
    return max((step.get("peak_bytes", 0) for step in result.get("steps", [])), default=0)


def reserved_of(result: Figures) -> int:
    return max((step.get("reserved_bytes", 0) for step in result.get("steps", [])), default=0)


def seconds_of(result: Figures) -> float | None:
    """Return the median time of the timed steps, or None. Timed steps begin when the engine follows a
    plan.
    """
    counted = result.get("seconds", [])[result.get("first_measured", 10**9) :]
    return median(counted) if counted else None


def within(ended: Ended) -> bool | None:
    """Return True if torch's count of allocated bytes never exceeded the budget. Return None if the job had
    no budget, ran no step or recorded slots.
    """
    budget, peak = ended.job.asked.get("memory"), peak_of(ended.result)
    return peak <= budget if budget and peak and not ended.job.asked.get("slots") else None


def run_row(ended: Ended) -> Figures:
    """Return the row of a training: its results, and its error if it failed."""
    result, settings = ended.result, ended.job.asked
    row: Figures = {
        "name": ended.job.name,
        "ended": ended.why,
        "code": ended.code,
        "seconds": ended.seconds,
        "asked": settings,
        "in_order": ended.in_order,
        **{
            name: result[name]
            for name in ("error", "said", "not available", "short", "slots")
            if name in result
        },
        "steps": len(result.get("losses", [])),
        "planned_steps": sum(step.get("phase") == "planned" for step in result.get("steps", [])),
        "step_seconds": result.get("seconds", []),
        "measured_s": seconds_of(result),
        "peak_bytes": peak_of(result),
        "reserved_bytes": reserved_of(result),
        "within": within(ended),
        "per_step": result.get("steps", []),
        "losses": result.get("losses", []),
        "stats": result.get("stats", {}),
        "lines": lines_of(ended),
    }
    if settings.get("memory"):
        row["budget_bytes"] = settings["memory"]
        row["over_bytes"] = max(0, peak_of(result) - settings["memory"])
    if REHEARSAL and settings.get("inner", "inductor") == "inductor":
        row["numbers"] = NOTHING_DONE
    if not ended.in_order:
        row["tail"] = ended.tail[-3000:]
    return row


def lines_of(ended: Ended) -> list[str]:
    """Return the last lines that teraio logged, such as its plan and its fallbacks."""
    lines = [line[:400] for line in ended.tail.splitlines() if line.startswith("teraio")]
    return [line for line in lines if not line.startswith("teraio: measured step")][-SAID_MOST:]


def has(ended: Ended, text: str) -> bool:
    """Return True if the text occurs in the job's last output or error."""
    outputs = (
        ended.result.get("error", ""),
        ended.result.get("said", ""),
        "" if ended.in_order else ended.tail,
    )
    return any(text in each for each in outputs)


def compared(ours: Ended, plain: Ended | None, twice: Ended | None) -> Figures:
    """Compare the losses of teraio with the losses of the plain run, bit for bit. If a second plain run
    differs from the first, do not compare.
    """
    row: Figures = {"name": ours.job.name, "equal": None, "within": within(ours)}
    if plain is None or not plain.result.get("losses") or not ours.result.get("losses"):
        return {**row, "not compared": "one of the two has no losses"}
    row |= {"reference": plain.job.name, "reference_peak_bytes": peak_of(plain.result)}
    if budget := ours.job.asked.get("memory"):
        row["budget_of_peak"] = round(budget / peak_of(plain.result), 4) if peak_of(plain.result) else None
    if REHEARSAL and plain.job.asked.get("inner", "inductor") == "inductor":
        return {**row, "not compared": NOTHING_DONE}
    one, other = plain.result["losses"], ours.result["losses"]
    row |= {"steps": min(len(one), len(other)), "losses_apart": apart(one, other)}
    if twice is not None and twice.result.get("losses"):
        itself = same(one, twice.result["losses"])
        if not itself:
            return {
                **row,
                "not compared": "plain differs from itself",
                "plain_apart": apart(one, twice.result["losses"]),
            }
    else:
        row["plain_twice"] = "not known"
    return {**row, "equal": same(one, other)}


def same(one: list[str], other: list[str]) -> bool:
    count = min(len(one), len(other))
    return one[:count] == other[:count]


def apart(one: list[str], other: list[str]) -> float:
    """Return the largest relative difference of two losses of the same step."""
    pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in zip(one, other)]
    return max(
        (abs(a / b - 1) if b else abs(a) for a, b in pairs if not isnan(a) and not isnan(b)), default=0.0
    )


def speed_row(ended: Ended, plain: Ended | None) -> Figures:
    """Return a row of speed. The row compares the time of a step with the plain run, with the plan's
    prediction and with its bound.
    """
    result, settings = ended.result, ended.job.asked
    took, stats = seconds_of(result), result.get("stats", {})
    row: Figures = {"name": ended.job.name, "step_s": took, "peak_bytes": peak_of(result)}
    row["reserved_bytes"] = reserved_of(result)
    if not took:
        return {**row, "not known": "no step after its plan"}
    row["tokens_per_s"] = round(settings["batch"] * settings["length"] / took, 1)
    for name in (
        "predicted_step_ns",
        "bound_ns",
        "step_stall_ns",
        "reserve_bytes",
        "step_misses",
        "budget_bytes",
    ):
        row[name] = stats.get(name)
    if bound := stats.get("bound_ns"):
        row["over_bound"] = round(took * 1e9 / bound, 4)
    if predicted := stats.get("predicted_step_ns"):
        row["over_predicted"] = round(took * 1e9 / predicted, 4)
    if plain is not None and (alone := seconds_of(plain.result)):
        row["over_plain"] = round(took / alone, 4)
        row["same_losses"] = same(plain.result["losses"], result["losses"])
    if REHEARSAL:
        row["numbers"] = NOTHING_DONE
    return {**row, "within": within(ended), "compile_s": (result.get("seconds") or [None])[0]}
