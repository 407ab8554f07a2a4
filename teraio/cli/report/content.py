"""All that is told of a step, as figures, tables and sentences: the page and the terminal only lay it out."""

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

SLICES = 24  # of the tables that stand beside the pictures
WAITS = 12
DRIFTS = 10


@dataclass(frozen=True, slots=True)
class Sources:
    """What a report is made of; only the timeline must be there."""

    line: Timeline
    name: str  # of its file
    profile: Profile | None = None
    plan: Plan | None = None
    machine: Machine | None = None
    predicted: Timeline | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """The first row of cells of each row is its heading. `tensors`: the column that names tensors."""

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
    causes: tuple[str, ...]  # what they mean
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
        return "the kernels of this step ran faster than those that were profiled"
    return f"this step takes {step / bound:.2f} times that"


def figures_of_timeline(line: Timeline) -> dict[str, int]:
    """The same as numbers, for programs."""
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
    told = [
        f"A step of {fmt_ns(step)}, of which compute waits {fmt_ns(waited)} "
        f"({_format_percent(waited, step)})."
    ]
    if waited * 100 >= step > 0:
        worst = max(by_cause, key=lambda cause: by_cause[cause])
        told.append(f"Most of that is “{worst}”: {CAUSE_WORDS.get(worst, 'an unknown cause')}.")
        busiest = max(
            (
                (picture_data.busy_ns(spans), track)
                for track, spans in picture_data.spans_by_lane(line).items()
            ),
            default=(0, ""),
        )
        if busiest[0] * 20 >= step * 19:
            told.append(
                f"The lane {busiest[1]} is busy all the time: no order of moves helps, only fewer bytes on "
                f"it or a faster link."
            )
        elif worst != "miss":
            told.append("No link is busy all the time: with more room in memory things could move earlier.")
    elif line.stalls or picture_data.spans_by_lane(line):
        told.append("Transfers are hidden behind compute.")
    if not picture_data.spans_by_lane(line):
        told.append("Nothing moves: the step fits into memory whole.")
    if line.overrun_bytes:
        told.append(
            f"User code, or a library's kernel, got {fmt_bytes(line.overrun_bytes, up=True)} beyond the "
            f"budget; the peak and the picture lack them."
        )
    bound = sources.plan.predicted.bound_ns if sources.plan else 0
    if bound:
        told.append(
            f"No plan for this profile takes less than {fmt_ns(bound)}; "
            f"{_describe_step_against_bound(step, bound)}."
        )
    return told


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
    """Return what stands beside the peak, which has the reserve and lacks the overrun."""
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
    return Table("Bytes on the device, at the fullest moment of each slice of the step", head, tuple(rows))


def _lanes_table(sources: Sources) -> Table:
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
                fmt_rate(rates[track]) if track in rates else "-",
            )
        )
    head = ("lane", "name", "transfers", "carries", "busy", "of the step", "while busy", "the link can")
    return Table("What every lane carries", head, tuple(rows))


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
    caption = "What compute waits for, the longest first"
    if left:
        rest = fmt_ns(sum(ns for _, stalls in left for ns, _ in stalls))
        caption += f"; {fmt_count(len(left), 'tensor')} more: {rest} together"
    head = ("tensor", "time", "times", "most before", "cause")
    return Table(caption, head, tuple(rows), tensors=0)


def _predicted_and_measured_table(sources: Sources) -> Table | None:
    one, other = sources.line, sources.predicted
    if other is None:
        return None

    def row_with_drift(what: str, got: int, said: int, fmt: str) -> tuple[str, ...]:
        show = fmt_ns if fmt == "ns" else fmt_bytes
        return (what, show(said), show(got), f"{got / said - 1:+.1%}" if said else "-")

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
    got, said = picture_data.spans_by_lane(one), picture_data.spans_by_lane(other)
    for track in sorted({*got, *said}):
        mine, theirs = got.get(track, []), said.get(track, [])
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
    """The kernels that differ most, where both have the same kernels."""
    if sources.predicted is None:
        return None
    got, said = picture_data.kernel_spans(sources.line), picture_data.kernel_spans(sources.predicted)
    if [span.name for span in got] != [span.name for span in said]:
        return None
    found = []
    for tick, (one, other) in enumerate(zip(got, said)):
        took, thought = one.end_ns - one.start_ns, other.end_ns - other.start_ns
        found.append((took - thought, tick, took, thought))
    found.sort(key=lambda row: (-abs(row[0]), row[1]))
    rows = [
        (
            f"{got[tick].name} (tick {tick})",
            fmt_ns(thought),
            fmt_ns(took),
            f"{'+' * (more > 0)}{fmt_ns(more)}",
        )
        for more, tick, took, thought in found[:DRIFTS]
    ]
    head = ("kernel", "predicted", "measured", "drift")
    return Table("Kernels that differ most from what was predicted", head, tuple(rows))


def _mismatch_notes(sources: Sources) -> list[str]:
    notes = []
    names = [span.name for span in picture_data.kernel_spans(sources.line)]
    if sources.profile is None:
        notes.append("Without --profile it is not known when a tensor is used, only when it moves.")
    elif [kernel.name for kernel in sources.profile.kernels] != names:
        notes.append("The profile is of another step than the timeline: uses of tensors are left out.")
    predicted = sources.predicted
    if predicted is not None and [span.name for span in picture_data.kernel_spans(predicted)] != names:
        notes.append("The predicted timeline has other kernels than this one: only sums are compared.")
    return notes


def has_matching_profile(sources: Sources) -> bool:
    names: Sequence[str] = [span.name for span in picture_data.kernel_spans(sources.line)]
    return sources.profile is not None and [kernel.name for kernel in sources.profile.kernels] == names
