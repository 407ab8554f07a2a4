"""Tables of docs/rivals.md and docs/recipes/. In: the rows of rivals.py. Out: Markdown, by the table's name.

A test compares the pages with these tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rivals_published import CARDS, LONG, LORA, PUBLISHED, Published, Step, work_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "docs/rivals.md", *sorted((ROOT / "docs/recipes").glob("*.md")))
# A table of a page, with the comment before it that names the table.
TABLE = re.compile(r"<!-- table: ([\w -]+) -->\n\n(?:\|.*\n)*")
Row = dict[str, Any]
GB = 10**9
# Bytes that a drive is rated to write, per byte of its capacity. `teraio plan` assumes the same.
ENDURANCE = 600
DRIVE_DOLLARS_PER_TB = 100  # an assumption, for one TB of capacity
NAMES = {
    "llama-3.1-8b": "Llama-3.1-8B",
    "llama-3.1-70b": "Llama-3.1-70B",
    "qwen2.5-7b": "Qwen2.5-7B",
    "qwen2.5-14b": "Qwen2.5-14B",
    "qwen3-32b": "Qwen3-32B",
}


def page_tables(rows: Sequence[Row], laptop: Row) -> dict[str, str]:
    """Return each table of the pages by its name. `laptop` is the row of benchmarks/people/laptop.py."""
    return {
        "rtx4090": _table_beside_published(rows, "rtx4090", ("rtx4090-1ssd", "rtx4090-4ssd"), (50, 70, 90)),
        "h100": _table_beside_published(rows, "h100", ("h100-4ssd",), (50, 70)),
        "same host memory": _table_of_same_host_memory(rows),
        "other machines": _table_of_other_machines(rows),
        "plans": _table_of_plans(rows),
        "8b-24gb": recipe_table(rows, ("rtx4090-1ssd", "rtx4090-4ssd"), _step_8b()),
        "70b-80gb": recipe_table(rows, ("h100-4ssd",), _step_70b()),
        "lora-70b-24gb": recipe_table(rows, ("rtx4090-1ssd", "rtx4090-4ssd"), LORA),
        "laptop": _table_of_laptop(laptop),
        "long-sequence": recipe_table(rows, ("h100-4ssd",), LONG),
    }


def with_tables(page: str, tables: dict[str, str]) -> str:
    """Return the text of a page, with the table behind each comment replaced by the table of this name."""
    return TABLE.sub(lambda match: f"<!-- table: {match[1]} -->\n\n{tables[match[1]]}", page)


def _step_8b() -> Step:
    return next(each.step for each in PUBLISHED if each.step.batch == 64 and each.system == "RoundPipe")


def _step_70b() -> Step:
    return Step("llama-3.1-70b", 4096, 32)


def rows_of(rows: Iterable[Row], machine: str, step: Step) -> dict[int, Row]:
    """Return the rows of this machine and step, by efficiency."""
    wanted = (machine, step.model, step.sequence, step.batch, step.micro_batches, step.frozen)
    names = ("machine", "model", "sequence", "batch", "micro_batches", "frozen")
    return {row["efficiency_percent"]: row for row in rows if tuple(row[name] for name in names) == wanted}


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    texts = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in texts) + "\n"


def describe_step(step: Step) -> str:
    return f"{NAMES[step.model]}, {step.batch * step.micro_batches} x {step.sequence}"


def _speed(row: Row) -> str:
    return "no plan" if "refused" in row else f"{row['tokens_per_s']:,.0f} ({row['of_peak_percent']:.0f} %)"


def _speeds(found: dict[int, Row], percents: Sequence[int]) -> str:
    return "; ".join(_speed(found[percent]) for percent in percents if percent in found) or "not planned"


def _published(each: Published) -> str:
    work = work_of(each.step.model, each.step.sequence, each.step.frozen)
    part = each.tokens_per_s * work.flop_per_token / CARDS[each.card].peak_flop_per_s
    return f"{each.tokens_per_s:,.0f} ({part:.0%})".replace("%", " %")


def _table_beside_published(
    rows: Sequence[Row], card: str, machines: Sequence[str], percents: Sequence[int]
) -> str:
    kernels = ", ".join(map(str, percents))
    head = ["model, step", "rival", "published", *(f"`{name}`: {kernels} %" for name in machines)]
    lines = [
        [
            describe_step(each.step),
            each.system,
            _published(each),
            *(_speeds(rows_of(rows, machine, each.step), percents) for machine in machines),
        ]
        for each in PUBLISHED
        if each.card == card
    ]
    return markdown(head, lines)


def _table_of_same_host_memory(rows: Sequence[Row]) -> str:
    lines = []
    for each in PUBLISHED:
        found = rows_of(rows, "rtx4090-1ssd+176GB", each.step)
        if 70 in found:
            row = found[70]
            host = f"{row['host_bytes'] / GB:.0f} GB"
            written = f"{row['ssd_written_bytes'] / GB:.0f} GB"
            lines.append(
                [describe_step(each.step), each.system, _published(each), _speed(row), host, written]
            )
    return markdown(
        [
            "model, step",
            "rival",
            "published",
            "planned, kernels at 70 %",
            "host memory of the plan",
            "written",
        ],
        lines,
    )


def _table_of_other_machines(rows: Sequence[Row]) -> str:
    machines = ("h100-4ssd", "gh200-4ssd", "gb200-4ssd")
    lines = [
        [describe_step(step), *(_speeds(rows_of(rows, machine, step), (70,)) for machine in machines)]
        for step in (_step_8b(), _step_70b())
    ]
    return markdown(["model, step", *(f"`{name}`: 70 %" for name in machines)], lines)


def _table_of_plans(rows: Sequence[Row]) -> str:
    """Return one line per plan with kernels at 70 %."""
    head = ["machine", "model, step", "step", "compute alone", "bound"]
    head += ["host memory", "on drives", "written", "life of the drives"]
    lines = []
    for row in rows:
        if row["efficiency_percent"] != 70 or "refused" in row or row["frozen"]:
            continue
        step = Step(row["model"], row["sequence"], row["batch"], row["micro_batches"], row["frozen"])
        lines.append(
            [
                f"`{row['machine']}`",
                describe_step(step),
                *(f"{row[name] / 1000:.1f} s" for name in ("step_ms", "compute_ms", "bound_ms")),
                *(f"{row[name] / GB:.0f} GB" for name in ("host_bytes", "ssd_bytes", "ssd_written_bytes")),
                life_of_drives(row),
            ]
        )
    return markdown(head, lines)


def _table_of_laptop(row: Row) -> str:
    """Return the measured figures of the laptop recipe. Its drive of 256 GB is rated for 150 TB."""
    step_s, written = row["step_s"], row["written_bytes"]
    per_day = written / step_s * 86_400
    lines = [
        ("memory for tensors", "no budget", f"{row['budget_mib']} MiB"),
        (
            "peak of tensors",
            f"{row['plain_peak_bytes'] / 2**20:.0f} MiB",
            f"{row['peak_bytes'] / 2**20:.0f} MiB",
        ),
        ("time of a step", f"{row['plain_step_s']:.2f} s", f"{step_s:.2f} s"),
        ("tokens per second", f"{row['tokens'] / row['plain_step_s']:.0f}", f"{row['tokens'] / step_s:.0f}"),
        (
            "electricity for 10^6 tokens",
            *(f"${_laptop_dollars(row, name):.4f}" for name in ("plain_step_s", "step_s")),
        ),
        ("written to the drive per step", "0", f"{written / 1e6:.0f} MB"),
        ("written per 10^6 tokens", "0", f"{1e6 / row['tokens'] * written / 1e9:.0f} GB"),
        ("wear of the drive for 10^6 tokens", "$0", f"${_laptop_wear_dollars(row):.4f}"),
        ("written per day", "0", f"{per_day / 1e12:.1f} TB"),
        ("life of a drive rated for 150 TB", "no wear", f"{150e12 / per_day:.0f} days"),
    ]
    return markdown(("", "plain training", "within the budget"), lines)


def _laptop_dollars(row: Row, step: str) -> float:
    """Return the price of the electricity for 10^6 tokens, at 30 W and $0.30 per kWh."""
    return 1e6 / row["tokens"] * row[step] / 3600 * 0.030 * 0.30


def _laptop_wear_dollars(row: Row) -> float:
    """Return the part of the drive's price that the writes for 10^6 tokens wear off. The drive is rated for
    150 TB, and costs $25.60.
    """
    return 1e6 / row["tokens"] * row["written_bytes"] / 150e12 * 0.256 * DRIVE_DOLLARS_PER_TB


def life_of_drives(row: Row) -> str:
    """Return how long the drives last if such steps run all day."""
    if not row["ssd_written_bytes"]:
        return "no writes"
    rated = ENDURANCE * row["ssd_capacity_bytes"]
    days = rated / row["ssd_written_bytes"] * row["step_ms"] / 1000 / 86_400
    return f"{days:.0f} days" if days < 730 else f"{days / 365.25:.0f} years"


def _wear_dollars(row: Row) -> float:
    """Return the part of the drives' price that one step wears off."""
    return row["ssd_written_bytes"] / 1e12 * DRIVE_DOLLARS_PER_TB / ENDURANCE


def terabytes_per_day(row: Row) -> str:
    per_day = row["ssd_written_bytes"] / (row["step_ms"] / 1000) * 86_400
    return f"{per_day / 1e12:.0f} TB" if per_day > 1e12 else f"{per_day / 1e9:.0f} GB"


def recipe_table(rows: Sequence[Row], machines: Sequence[str], step: Step) -> str:
    """Return one line per machine and efficiency: the figures that a user of a recipe expects."""
    head = ["machine", "kernels at", "step", "tokens per second", "10^6 tokens take"]
    head += [
        "host memory",
        "written per day",
        "life of the drives",
        "rent for 10^6 tokens",
        "wear of drives for 10^6 tokens",
    ]
    lines = []
    for machine in machines:
        card = CARDS[machine.partition("-")[0]]
        for percent, row in sorted(rows_of(rows, machine, step).items()):
            seconds = 1e6 / row["tokens_per_s"]
            lines.append(
                [
                    f"`{machine}`",
                    f"{percent} %",
                    f"{row['step_ms'] / 1000:.1f} s",
                    f"{row['tokens_per_s']:,.0f}",
                    f"{seconds / 60:.0f} min",
                    f"{row['host_bytes'] / GB:.0f} GB",
                    terabytes_per_day(row),
                    life_of_drives(row),
                    f"${card.dollars_per_hour * seconds / 3600:.2f}",
                    f"${_wear_dollars(row) * seconds * 1000 / row['step_ms']:.2f}",
                ]
            )
    return markdown(head, lines)
