"""The content of a report: figures, tables and sentences.

The HTML page and the terminal text show this content, each in its own layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from teraio.formats.machine import Machine
from teraio.formats.plan import Plan
from teraio.formats.profile import Profile
from teraio.formats.timeline import Timeline
from teraio.units import fmt_bytes, fmt_count, fmt_ns, fmt_rate

from . import picture_data
from .labels import CAUSE_WORDS, KIND_WORDS, describe_lane

SLICES = 24  # rows of each table that repeats a picture as text
WAITS = 12
DRIFTS = 10


@dataclass(frozen=True, slots=True)
class Sources:
    """The inputs of a report. Only the timeline is required."""

    line: Timeline
    name: str  # the name of the timeline's file
    profile: Profile | None = None
    plan: Plan | None = None
    machine: Machine | None = None
    predicted: Timeline | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table. The first cell of each row is the row's heading.

    `tensors` is the index of the column that contains tensor names. It is -1 if no column does.
    """

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    tensors: int = -1


@dataclass(frozen=True, slots=True)
class Fact:
    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Content:
    sources: Sources
    title: str
    sentences: tuple[str, ...]
    facts: tuple[Fact, ...]
    memory: Table
    lanes: Table
    slices: Table
    waits: Table
    causes: tuple[str, ...]  # one explanation for each cause of waits in the timeline
    compared: Table | None = None
    drifts: Table | None = None
    what_if: Table | None = None
    notes: tuple[str, ...] = field(default=())


def assemble_content(sources: Sources, what_if: Table | None = None) -> Content:
    line = sources.line
    name = sources.profile.name if sources.profile and sources.profile.name else sources.name
    return Content(
        sources,
        f"{name}: {'one measured step' if line.kind == 'measured' else 'the predicted step'}",
        tuple(_sentences_about_step(sources)),
        tuple(_headline_facts(sources)),
        _memory_by_slice_table(line),
        _lanes_table(sources),
        _busy_by_slice_table(line),
        _waits_table(line),
        tuple(f"{c}: {CAUSE_WORDS[c]}." for c in CAUSE_WORDS if any(s.cause == c for s in line.stalls)),
        _predicted_and_measured_table(sources),
        _kernel_drifts_table(sources),
        what_if,
        tuple(_mismatch_notes(sources)),
    )


def _describe_step_against_bound(step: int, bound: int) -> str:
    if step < bound:
        return "the kernels of this step ran faster than in the profile"
    return f"this step takes {step / bound:.2f} times that"


def figures_of_timeline(line: Timeline) -> dict[str, int]:
    """Return the figures of a timeline as numbers, for programs."""
    lanes = picture_data.spans_by_lane(line)
    carried = {
        f"{track.replace(':', '_')}_bytes": sum(span.bytes for span in spans)
        for track, spans in lanes.items()
    }
    busy = {
        f"{track.replace(':', '_')}_busy_ns": picture_data.busy_ns(spans) for track, spans in lanes.items()
    }
    return {
        "step_ns": picture_data.step_ns(line),
        "compute_ns": _computed_ns(line),
        "stall_ns": waited_ns(line),
        "misses": sum(stall.cause == "miss" for stall in line.stalls),
        "peak_bytes": picture_data.memory_curve(line).peak_bytes,
        "budget_bytes": line.budget_bytes,
        "overrun_bytes": line.overrun_bytes,
        **carried,
        **busy,
    }


def waited_ns(line: Timeline) -> int:
    return sum(stall.ns for stall in line.stalls)


def _computed_ns(line: Timeline) -> int:
    return sum(span.end_ns - span.start_ns for span in picture_data.kernel_spans(line))


def _sentences_about_step(sources: Sources) -> list[str]:
    line = sources.line
    step, waited = picture_data.step_ns(line), waited_ns(line)
    causes = sorted({stall.cause for stall in line.stalls})
    by_cause = {c: sum(stall.ns for stall in line.stalls if stall.cause == c) for c in causes}
    sentences = [
        f"A step of {fmt_ns(step)}, of which compute waits {fmt_ns(waited)} "
        f"({_format_percent(waited, step)})."
    ]
    if waited * 100 >= step > 0:
        worst = max(by_cause, key=lambda cause: by_cause[cause])
        sentences.append(f"Most of that is “{worst}”: {CAUSE_WORDS.get(worst, 'an unknown cause')}.")
        busiest = max(
            (
                (picture_data.busy_ns(spans), track)
                for track, spans in picture_data.spans_by_lane(line).items()
            ),
            default=(0, ""),
        )
        if busiest[0] * 20 >= step * 19:
            sentences.append(
                f"The lane {busiest[1]} is busy all the time: no order of moves helps, only fewer bytes on "
                f"it or a faster link."
            )
        elif worst != "miss":
            sentences.append("No link is busy all the time: with more memory, tensors could move earlier.")
    elif line.stalls or picture_data.spans_by_lane(line):
        sentences.append("Transfers are hidden behind compute.")
    if not picture_data.spans_by_lane(line):
        sentences.append("Nothing moves: the whole step fits into memory.")
    if line.overrun_bytes:
        sentences.append(
            f"User code or a library's kernel took {fmt_bytes(line.overrun_bytes, up=True)} beyond the "
            f"budget. The peak and the picture do not include them."
        )
    bound = sources.plan.predicted.bound_ns if sources.plan else 0
    if bound:
        sentences.append(
            f"No plan for this profile takes less than {fmt_ns(bound)}; "
            f"{_describe_step_against_bound(step, bound)}."
        )
    return sentences


def _headline_facts(sources: Sources) -> list[Fact]:
    line = sources.line
    step, waited = picture_data.step_ns(line), waited_ns(line)
    peak, budget = picture_data.memory_curve(line).peak_bytes, line.budget_bytes
    lanes = picture_data.spans_by_lane(line)
    carried = {way: sum(s.bytes for t, of in lanes.items() if t.startswith(way) for s in of) for way in _WAYS}
    moves = {way: sum(len(of) for track, of in lanes.items() if track.startswith(way)) for way in _WAYS}
    missed = sum(stall.cause == "miss" for stall in line.stalls)
    return [
        Fact("step", fmt_ns(step), fmt_count(len(picture_data.kernel_spans(line)), "kernel")),
        Fact(
            "compute", fmt_ns(_computed_ns(line)), _format_percent(_computed_ns(line), step) + " of the step"
        ),
        Fact(
            "waiting",
            fmt_ns(waited),
            f"{_format_percent(waited, step)}, {fmt_count(len(line.stalls), 'stall')}",
        ),
        Fact("peak memory", fmt_bytes(peak), _peak_note(budget, line.overrun_bytes)),
        Fact("written", fmt_bytes(carried["evict"]), fmt_count(moves["evict"], "eviction")),
        Fact("read", fmt_bytes(carried["fetch"]), f"{moves['fetch']} fetches, {missed} misses"),
    ]


_WAYS = ("evict", "fetch")


def _peak_note(budget_bytes: int, overrun_bytes: int) -> str:
    """Return the note beside the peak memory: the budget, and the bytes beyond the budget (the overrun).

    The peak includes the memory in reserve for small allocations, but not the overrun.
    """
    of = [f"of {fmt_bytes(budget_bytes)}"] if budget_bytes else []
    return ", ".join(of + [f"{fmt_bytes(overrun_bytes, up=True)} beyond it"] * bool(overrun_bytes))


def _format_percent(one: int, whole: int) -> str:
    return f"{one / whole:.1%}" if whole else "-"


def _memory_by_slice_table(line: Timeline) -> Table:
    held = picture_data.memory_curve(line)
    edges = picture_data.slice_edges(picture_data.step_ns(line), SLICES)
    rows = [
        (
            f"{fmt_ns(low)} to {fmt_ns(high)}",
            *(fmt_bytes(size) for size in sizes),
            fmt_bytes(sum(sizes)),
        )
        for low, high, sizes in zip(edges, edges[1:], picture_data.peak_by_slice(held, edges))
    ]
    head = ("when", *(KIND_WORDS.get(kind, kind) for kind in held.kinds), "together")
    return Table("Bytes on the device, at the peak of each slice of the step", head, tuple(rows))


def _lanes_table(sources: Sources) -> Table:
    """Return the table of the lanes. Only with a machine, a column has the bandwidths of the links."""
    line = sources.line
    step = max(picture_data.step_ns(line), 1)
    rates = {}
    for link in sources.machine.links if sources.machine else ():
        evict = link.source == "device"
        rates[f"evict:{link.target}" if evict else f"fetch:{link.source}"] = link.bandwidth_bytes_per_s
    rows = []
    for track, spans in picture_data.spans_by_lane(line).items():
        busy, size = picture_data.busy_ns(spans), sum(span.bytes for span in spans)
        rows.append(
            (
                describe_lane(track),
                track,
                str(len(spans)),
                fmt_bytes(size),
                fmt_ns(busy),
                _format_percent(busy, step),
                fmt_rate(size * 10**9 // busy) if busy else "-",
                *([fmt_rate(rates[track]) if track in rates else "-"] if rates else []),
            )
        )
    bandwidth = ("the link can",) if rates else ()
    head = ("lane", "name", "transfers", "carries", "busy", "of the step", "while busy", *bandwidth)
    return Table("Transfers of every lane", head, tuple(rows))


def _busy_by_slice_table(line: Timeline) -> Table:
    edges = picture_data.slice_edges(picture_data.step_ns(line), SLICES)
    lanes = picture_data.spans_by_lane(line)
    columns = [
        picture_data.covered_share_by_slice(picture_data.kernel_spans(line), edges),
        picture_data.covered_share_by_slice(picture_data.timed_stalls(line), edges),
    ]
    columns += [picture_data.covered_share_by_slice(spans, edges) for spans in lanes.values()]
    rows = [
        (f"{fmt_ns(low)} to {fmt_ns(high)}", *(f"{part:.0%}" for part in parts))
        for low, high, *parts in zip(edges, edges[1:], *columns)
    ]
    head = ("when", "compute", "waiting", *map(describe_lane, lanes))
    return Table("How busy compute and every lane are, by slice of the step", head, tuple(rows))


def _waits_table(line: Timeline) -> Table:
    sums: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for stall in line.stalls:
        sums.setdefault((stall.tensor, stall.cause), []).append((stall.ns, stall.tick))
    ordered = sorted(sums.items(), key=lambda each: (-sum(ns for ns, _ in each[1]), each[0]))
    names = [span.name for span in picture_data.kernel_spans(line)]
    rows = []
    for (tensor, cause), stalls in ordered[:WAITS]:
        tick = max(stalls)[1]
        kernel = names[tick % len(names)] if names else "-"
        rows.append(
            (
                tensor,
                fmt_ns(sum(ns for ns, _ in stalls)),
                str(len(stalls)),
                f"{kernel} (tick {tick})",
                cause,
            )
        )
    left = ordered[WAITS:]
    caption = "Waits of compute, the longest first"
    if left:
        rest = fmt_ns(sum(ns for _, stalls in left for ns, _ in stalls))
        caption += f"; {fmt_count(len(left), 'tensor')} more: {rest} together"
    head = ("tensor", "time", "times", "most before", "cause")
    return Table(caption, head, tuple(rows), tensors=0)


def _predicted_and_measured_table(sources: Sources) -> Table | None:
    one, other = sources.line, sources.predicted
    if other is None:
        return None

    def row_with_drift(what: str, got: int, planned: int, fmt: str) -> tuple[str, ...]:
        show = fmt_ns if fmt == "ns" else fmt_bytes
        return (what, show(planned), show(got), f"{got / planned - 1:+.1%}" if planned else "-")

    rows = [
        row_with_drift("step", picture_data.step_ns(one), picture_data.step_ns(other), "ns"),
        row_with_drift("compute", _computed_ns(one), _computed_ns(other), "ns"),
        row_with_drift("waiting", waited_ns(one), waited_ns(other), "ns"),
        row_with_drift(
            "peak memory",
            picture_data.memory_curve(one).peak_bytes,
            picture_data.memory_curve(other).peak_bytes,
            "bytes",
        ),
    ]
    got, planned = picture_data.spans_by_lane(one), picture_data.spans_by_lane(other)
    for track in sorted({*got, *planned}):
        mine, theirs = got.get(track, []), planned.get(track, [])
        name = describe_lane(track)
        rows.append(
            row_with_drift(f"{name}, busy", picture_data.busy_ns(mine), picture_data.busy_ns(theirs), "ns")
        )
        rows.append(
            row_with_drift(
                f"{name}, carried", sum(s.bytes for s in mine), sum(s.bytes for s in theirs), "bytes"
            )
        )
    return Table("Predicted against measured", ("what", "predicted", "measured", "drift"), tuple(rows))


def _kernel_drifts_table(sources: Sources) -> Table | None:
    """Return the kernels whose measured time differs most from the predicted time.

    Return None without a predicted timeline, or if the two timelines have different kernels.
    """
    if sources.predicted is None:
        return None
    got, planned = picture_data.kernel_spans(sources.line), picture_data.kernel_spans(sources.predicted)
    if [span.name for span in got] != [span.name for span in planned]:
        return None
    found = []
    for tick, (one, other) in enumerate(zip(got, planned)):
        took, predicted_ns = one.end_ns - one.start_ns, other.end_ns - other.start_ns
        found.append((took - predicted_ns, tick, took, predicted_ns))
    found.sort(key=lambda row: (-abs(row[0]), row[1]))
    rows = [
        (
            f"{got[tick].name} (tick {tick})",
            fmt_ns(predicted_ns),
            fmt_ns(took),
            f"{'+' * (more > 0)}{fmt_ns(more)}",
        )
        for more, tick, took, predicted_ns in found[:DRIFTS]
    ]
    head = ("kernel", "predicted", "measured", "drift")
    return Table("Kernels with the largest drift from their prediction", head, tuple(rows))


def _mismatch_notes(sources: Sources) -> list[str]:
    notes = []
    names = [span.name for span in picture_data.kernel_spans(sources.line)]
    if sources.profile is None:
        notes.append("Without --profile the report has the moves of tensors, but not their uses.")
    elif [kernel.name for kernel in sources.profile.kernels] != names:
        notes.append("The profile is of another step than the timeline, so the report omits uses of tensors.")
    predicted = sources.predicted
    if predicted is not None and [span.name for span in picture_data.kernel_spans(predicted)] != names:
        notes.append("The predicted timeline has other kernels than this one, so only sums are compared.")
    return notes


def has_matching_profile(sources: Sources) -> bool:
    names: Sequence[str] = [span.name for span in picture_data.kernel_spans(sources.line)]
    return sources.profile is not None and [kernel.name for kernel in sources.profile.kernels] == names
