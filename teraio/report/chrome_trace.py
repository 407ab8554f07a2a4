"""A Chrome trace of a timeline, for Perfetto and chrome://tracing: tracks of transfers, and counters of
bytes.

The transfers of one direction of one link are a lane. Events on one track must not overlap, so a lane with
overlapping transfers gets several tracks. Each memory tier gets a counter.
"""

from __future__ import annotations

import json
from typing import Any

from teraio.formats.timeline import Span, Timeline

from . import picture_data
from .labels import describe_lane

PID = 1


def timeline_as_trace(line: Timeline) -> str:
    """Return the trace as JSON text. Times are in microseconds, as the format requires."""
    tracks: list[tuple[str, list[dict[str, Any]]]] = []
    compute = [
        _slice_event(s.name, s.start_ns, s.end_ns, tick=i)
        for i, s in enumerate(picture_data.kernel_spans(line))
    ]
    tracks.append(("compute", compute))
    waits = [
        _slice_event(f"wait: {w.stall.cause}", w.start_ns, w.end_ns, tensor=w.stall.tensor, tick=w.stall.tick)
        for w in picture_data.timed_stalls(line)
    ]
    tracks.append(("waiting", waits))
    for track, spans in picture_data.spans_by_lane(line).items():
        rows: dict[int, list[Span]] = {}
        for span, row in zip(spans, picture_data.assign_rows_without_overlap(spans)):
            rows.setdefault(row, []).append(span)
        for row, placed in sorted(rows.items()):
            name = f"{track} ({describe_lane(track)})" + (f" {row + 1}" if row else "")
            tracks.append(
                (
                    name,
                    [_slice_event(s.tensor or s.name, s.start_ns, s.end_ns, bytes=s.bytes) for s in placed],
                )
            )
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": PID, "args": {"name": f"teraio, {line.kind} step"}}
    ]
    for tid, (name, slices) in enumerate(tracks, start=1):
        events.append({"ph": "M", "name": "thread_name", "pid": PID, "tid": tid, "args": {"name": name}})
        order = {"sort_index": tid}
        events.append({"ph": "M", "name": "thread_sort_index", "pid": PID, "tid": tid, "args": order})
        ordered = sorted(slices, key=lambda each: float(each["ts"]))
        events += [{**each, "pid": PID, "tid": tid} for each in ordered]
    events += _counter_events(line)
    about = {"budget_bytes": line.budget_bytes, "step_ns": picture_data.step_ns(line), "kind": line.kind}
    return json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}, allow_nan=False)


def _slice_event(name: str, start_ns: int, end_ns: int, **details: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": details,
    }


def _counter_events(line: Timeline) -> list[dict[str, Any]]:
    """Return a counter event for each moment at which the bytes in a memory tier change.

    Each event contains the bytes of all kinds of memory in this tier, because viewers stack only the values
    in one event.
    """
    now: dict[str, dict[str, int]] = {}
    moments: dict[tuple[int, str], dict[str, int]] = {}
    for counter in sorted(line.counters, key=lambda counter: counter.at_ns):
        tier = now.setdefault(counter.tier, {})
        tier[counter.kind] = counter.bytes
        moments[counter.at_ns, counter.tier] = dict(tier)
    return [
        {"ph": "C", "name": f"{tier} bytes", "pid": PID, "ts": at_ns / 1000, "args": kinds}
        for (at_ns, tier), kinds in moments.items()
    ]
