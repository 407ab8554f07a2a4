"""Data for pictures of a timeline: when compute waits, transfers in rows without overlap, bytes over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from teraio.formats.timeline import Span, Stall, Timeline

from .labels import sort_key_of_kind

COMPUTE = "compute"
KINDS_MAX = 16  # most kinds of memory in a picture
OTHER_KINDS = "other kinds"


@dataclass(frozen=True, slots=True)
class TimedStall:
    """A stall (a wait of compute for a transfer), with its start and its end."""

    start_ns: int
    end_ns: int
    stall: Stall


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Bytes on the device over time, by kind of memory (such as weights).

    Row i of `bytes` is valid from the time `at_ns[i]` until the time of the next row.
    """

    kinds: tuple[str, ...]
    at_ns: tuple[int, ...]
    bytes: tuple[tuple[int, ...], ...]  # one row per moment; its columns are the `kinds`

    def total_bytes_by_moment(self) -> list[int]:
        return [sum(row) for row in self.bytes]

    @property
    def peak_bytes(self) -> int:
        return max(self.total_bytes_by_moment(), default=0)


def kernel_spans(line: Timeline) -> list[Span]:
    return [span for span in line.spans if span.track == COMPUTE]


def spans_by_lane(line: Timeline) -> dict[str, list[Span]]:
    """Return the transfers of each lane. Leave out drops, because a drop transfers no bytes."""
    found: dict[str, list[Span]] = {}
    for span in line.spans:
        if span.track != COMPUTE and not span.track.startswith("drop:"):
            found.setdefault(span.track, []).append(span)
    return dict(sorted(found.items()))


def step_ns(line: Timeline) -> int:
    """Return the duration of the step. If the timeline has no duration, return the end of the last kernel."""
    return line.step_ns or max((span.end_ns for span in kernel_spans(line)), default=0)


def assign_rows_without_overlap(spans: Sequence[Span]) -> list[int]:
    """Return a row for each span, so that no two spans in one row overlap. Use the first row that is free."""
    ends: list[int] = []
    found = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].start_ns, spans[i].end_ns)):
        span = spans[index]
        row = next((row for row, end in enumerate(ends) if end <= span.start_ns), len(ends))
        ends[row:] = [span.end_ns, *ends[row + 1 :]]
        found[index] = row
    return found


def timed_stalls(line: Timeline) -> list[TimedStall]:
    """Return the stalls (waits of compute for a transfer) with a start and an end.

    The timeline has only the durations of stalls, so this function infers when a stall happened. If the gap
    before the kernel is at least half of the kernel's waits, the stalls end where the kernel begins.
    Otherwise user code waited inside the kernel, and the stalls end with the kernel. The stalls of one kernel
    lie one after another.
    """
    spans = kernel_spans(line)
    by_tick: dict[int, list[Stall]] = {}
    for stall in line.stalls:
        by_tick.setdefault(stall.tick, []).append(stall)
    found: list[TimedStall] = []
    for tick, stalls in sorted(by_tick.items()):
        if not spans:
            break
        span = spans[tick % len(spans)]
        before_ns = spans[tick - 1].end_ns if 0 < tick < len(spans) else 0
        waited_ns = sum(stall.ns for stall in stalls)
        at_ns = span.start_ns if 2 * (span.start_ns - before_ns) >= waited_ns else span.end_ns
        at_ns -= waited_ns
        for stall in stalls:
            found.append(TimedStall(max(at_ns, 0), max(at_ns + stall.ns, 0), stall))
            at_ns += stall.ns
    return found


def busy_ns(spans: Iterable[Span]) -> int:
    """Return how long at least one span was active."""
    return sum(end - start for start, end in merge_overlapping_spans(spans))


def merge_overlapping_spans(spans: Iterable[Span | TimedStall]) -> list[tuple[int, int]]:
    """Return the intervals in which at least one span is active, in order. Spans that overlap or touch are
    merged.
    """
    found: list[tuple[int, int]] = []
    for start, end in sorted((span.start_ns, span.end_ns) for span in spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def covered_share_by_slice(spans: Iterable[Span | TimedStall], edges: Sequence[int]) -> list[float]:
    """Return, for each slice of time, the part of the slice that the spans cover. Each slice lies between two
    neighbours in `edges`.
    """
    intervals = merge_overlapping_spans(spans)
    found, first = [], 0
    for low, high in pairwise(edges):
        while first < len(intervals) and intervals[first][1] <= low:
            first += 1
        covered, at = 0, first
        while at < len(intervals) and intervals[at][0] < high:
            covered += max(0, min(high, intervals[at][1]) - max(low, intervals[at][0]))
            at += 1
        found.append(covered / max(high - low, 1))
    return found


def memory_curve(line: Timeline) -> MemoryCurve:
    """Return the bytes on the device by kind of memory, with one row for each moment at which they change.

    A file can name any number of kinds. The last of the kinds is the sum of all kinds beyond `KINDS_MAX`.
    """
    counters = [counter for counter in line.counters if counter.tier == "device"]
    kinds = tuple(sorted({counter.kind for counter in counters}, key=sort_key_of_kind))
    place = {kind: min(index, KINDS_MAX) for index, kind in enumerate(kinds)}
    if len(kinds) > KINDS_MAX:
        kinds = (*kinds[:KINDS_MAX], OTHER_KINDS)
    bytes_of = dict.fromkeys(place, 0)
    now = [0] * len(kinds)
    moments: dict[int, tuple[int, ...]] = {}
    for counter in sorted(counters, key=lambda counter: counter.at_ns):
        now[place[counter.kind]] += counter.bytes - bytes_of[counter.kind]
        bytes_of[counter.kind] = counter.bytes
        moments[counter.at_ns] = tuple(now)
    return MemoryCurve(kinds, tuple(moments), tuple(moments.values()))


def picture_row_reached_by(size_bytes: int, top_bytes: int, height: int) -> int:
    """Return the picture row that a bar of `size_bytes` reaches. The bottom row is 1; the top row is
    `top_bytes`.
    """
    return -(-size_bytes * height // max(top_bytes, 1))


def peak_by_slice(held: MemoryCurve, edges: Sequence[int]) -> list[tuple[int, ...]]:
    """Return, for each slice of time, the bytes by kind of memory at the moment with the largest sum."""
    found: list[tuple[int, ...]] = []
    at, now = 0, (0,) * len(held.kinds)
    for high in edges[1:]:
        best = now
        while at < len(held.at_ns) and held.at_ns[at] < high:
            now = held.bytes[at]
            best = max(best, now, key=sum) if at else now
            at += 1
        found.append(best)
    return found


def slice_edges(end_ns: int, slices: int) -> list[int]:
    return [end_ns * index // slices for index in range(slices + 1)]
