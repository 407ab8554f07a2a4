"""Pictures of a step for notebooks. In: a timeline or a plan. Out: HTML with SVG, without scripts.

The labels are HTML beside the SVG, so that the drawing stretches with the notebook and the letters do not.
Text and lines have the notebook's own colour. The other colours have enough contrast on white and on black.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from teraio.formats.plan import Evict, Plan
from teraio.formats.timeline import Timeline
from teraio.units import fmt_bytes, fmt_ns, printable_line

from . import picture_data
from .labels import KIND_WORDS, KINDS, describe_lane

SLICES = 240  # columns of a picture
HOVERS = 48  # columns that show their figures under the mouse
LANES_MAX = 12  # most lanes of a picture; a file can name any number of lanes
HEIGHT = 1000  # the picture's height in units of its SVG


def picture_of_timeline(line: Timeline) -> str:
    """Draw the memory of each kind of tensor, and under it the waits and the transfers, over one time
    axis.
    """
    end_ns = picture_data.step_ns(line)
    held = picture_data.memory_curve(line)
    lanes = picture_data.spans_by_lane(line)
    edges = picture_data.slice_edges(end_ns, SLICES)
    waits = picture_data.timed_stalls(line)
    parts = [_memory_row(line, held, edges)] if held.kinds else []
    if waits or lanes:
        waited_ns = sum(stall.ns for stall in line.stalls)
        shares = picture_data.covered_share_by_slice(waits, edges)
        parts.append(_strip_row("compute waits", "wait", shares, _percent(waited_ns, end_ns)))
    for track, spans in list(lanes.items())[:LANES_MAX]:
        shares = picture_data.covered_share_by_slice(spans, edges)
        busy = _percent(picture_data.busy_ns(spans), end_ns)
        parts.append(_strip_row(describe_lane(track), _colour_of_lane(track), shares, busy))
    if not parts:
        return ""
    times = "".join(f"<span>{escape(fmt_ns(end_ns * part // 4))}</span>" for part in range(5))
    return f"<div class=picture>{''.join(parts)}<div class=times>{times}</div></div>{_legend(line, held)}"


def picture_of_plan(plan: Plan) -> str:
    """Draw the number of moves in flight over the ticks (the indexes of kernels), one strip per lane."""
    flights: dict[str, list[tuple[int, int]]] = {}
    for move in plan.moves:
        if move.trigger is None:
            continue
        way, tier, end = (
            ("evict", move.to, move.free) if isinstance(move, Evict) else ("fetch", move.source, move.ready)
        )
        flights.setdefault(f"{way}:{tier}", []).append((move.trigger, end))
    ticks = max((end for spans in flights.values() for _, end in spans), default=0)
    if not ticks:
        return ""
    edges = picture_data.slice_edges(ticks + 1, SLICES)
    parts = []
    for track, spans in sorted(flights.items())[:LANES_MAX]:
        counts = _in_flight_by_slice(spans, edges)
        most = max(counts)
        shares = [count / max(most, 1) for count in counts]
        parts.append(
            _strip_row(describe_lane(track), _colour_of_lane(track), shares, f"up to {most} at once")
        )
    marks = "".join(f"<span>{'tick ' if part == 0 else ''}{ticks * part // 4}</span>" for part in range(5))
    return f"<div class=picture>{''.join(parts)}<div class=times>{marks}</div></div>"


def _in_flight_by_slice(spans: Sequence[tuple[int, int]], edges: Sequence[int]) -> list[int]:
    """Return the largest number of moves that are in flight at once, for each slice of ticks."""
    changes = sorted([*((begin, 1) for begin, _ in spans), *((end + 1, -1) for _, end in spans)])
    counts, at, now = [], 0, 0
    for low, high in pairwise(edges):
        most = 0
        while at < len(changes) and changes[at][0] < high:
            if changes[at][0] > low:
                most = max(most, now)
            now += changes[at][1]
            at += 1
        counts.append(max(most, now))
    return counts


# ---- the memory


def _memory_row(line: Timeline, held: picture_data.MemoryCurve, edges: Sequence[int]) -> str:
    columns = picture_data.peak_by_slice(held, edges)
    top = max(held.peak_bytes, line.budget_bytes, 1)
    top += top // 20
    drawn = []
    below = [0] * len(columns)
    for index, kind in enumerate(held.kinds):
        above = [low + column[index] for low, column in zip(below, columns)]
        if above != below:
            most = fmt_bytes(max(column[index] for column in columns))
            name = escape(f"{_word_of(kind)}: up to {most}")
            outline = _outline([_y_of(size, top) for size in above], [_y_of(size, top) for size in below])
            drawn.append(
                f'<path d="{outline}" fill="var(--{_colour_of_kind(kind)})"><title>{name}</title></path>'
            )
        below = above
    step = _nice_step_bytes(top)
    marks = range(0, top, step)
    grid = "".join(f"M0 {_y_of(size, top)}h{SLICES}" for size in marks)
    drawn.insert(0, f'<path class=line d="{grid}"/>')
    if line.budget_bytes:
        drawn.append(f'<path class="line budget" d="M0 {_y_of(line.budget_bytes, top)}h{SLICES}"/>')
    drawn += _hover_columns(line, held)
    spoken = escape(
        f"Memory over a step of {fmt_ns(edges[-1])}, at most {fmt_bytes(held.peak_bytes)}", quote=True
    )
    labels = "".join(
        f"<span style='bottom:{size * 100 / top:.1f}%'>{fmt_bytes(size)}</span>" for size in marks
    )
    return (
        f"<div class='side axis quiet'>{labels}</div><div class=memory>{_svg(drawn, spoken)}</div><div></div>"
    )


def _svg(drawn: Sequence[str], spoken: str) -> str:
    return (
        f'<svg viewBox="0 0 {SLICES} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{spoken}">'
        f"{''.join(drawn)}</svg>"
    )


def _y_of(size_bytes: int, top_bytes: int) -> int:
    return HEIGHT - size_bytes * HEIGHT // top_bytes


def _outline(above: Sequence[int], below: Sequence[int]) -> str:
    """Return the SVG path around the area between two step curves with one value per column."""
    there = _steps(above, 1)
    return f"M0 {above[0]}{there}V{below[-1]}{_steps(below[::-1], -1)}Z"


def _steps(values: Sequence[int], direction: int) -> str:
    """Return the SVG path of a step curve, from its first value. Columns with equal values are one line."""
    pieces, run = [], 1
    for one, other in pairwise(values):
        if one == other:
            run += 1
        else:
            pieces.append(f"h{run * direction}v{other - one}")
            run = 1
    return "".join([*pieces, f"h{run * direction}"])


def _hover_columns(line: Timeline, held: picture_data.MemoryCurve) -> Iterator[str]:
    """Yield invisible columns. A column under the mouse shows the figures of its slice of the step."""
    edges = picture_data.slice_edges(picture_data.step_ns(line), HOVERS)
    waits = picture_data.covered_share_by_slice(picture_data.timed_stalls(line), edges)
    wide = SLICES // HOVERS
    for index, sizes in enumerate(picture_data.peak_by_slice(held, edges)):
        words = [f"{fmt_ns(edges[index])} to {fmt_ns(edges[index + 1])}: {fmt_bytes(sum(sizes))}"]
        words += [f"{_word_of(k)} {fmt_bytes(size)}" for k, size in zip(held.kinds, sizes) if size]
        words += [f"compute waits {waits[index]:.0%}"] * (waits[index] > 0)
        tip = escape("\n".join(words))
        place = f"x={index * wide} y=0 width={wide} height={HEIGHT}"
        yield f"<rect class=hover {place}><title>{tip}</title></rect>"


def _nice_step_bytes(top_bytes: int) -> int:
    """Return the distance of the marks on an axis: 1, 2 or 5 times a power of ten, in a binary unit."""
    unit = 1
    while unit * 1024 <= top_bytes and unit < 2**40:
        unit *= 1024
    step = unit
    for scale in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000):
        step = unit * scale
        if top_bytes <= 4 * step:
            break
    return max(step, top_bytes // 4)


# ---- strips and the legend


def _strip_row(name: str, colour: str, shares: Sequence[float], figure: str) -> str:
    """Draw a strip. The height of a column is the share of the slice, and any share above 0 is visible."""
    heights = [HEIGHT - max(round(share * HEIGHT), 120 if share > 0 else 0) for share in shares]
    outline = _outline(heights, [HEIGHT] * len(heights))
    spoken = escape(f"{name}: {figure}", quote=True)
    drawn = _svg([f'<path d="{outline}" fill="var(--{colour})"/>'], spoken)
    return (
        f"<div class=side>{escape(name)}</div><div class=strip>{drawn}</div><div class=quiet>{figure}</div>"
    )


def _legend(line: Timeline, held: picture_data.MemoryCurve) -> str:
    used = [kind for at, kind in enumerate(held.kinds) if any(row[at] for row in held.bytes)]
    entries = []
    for kind in reversed(used):
        box = f"<i style='background:var(--{_colour_of_kind(kind)})'></i>"
        entries.append(f"<span>{box}{escape(_word_of(kind))}</span>")
    if line.budget_bytes:
        entries.append(f"<span><i class=dash></i>budget {fmt_bytes(line.budget_bytes)}</span>")
    return f"<div class=legend>{''.join(entries)}</div>" if used else ""


def _word_of(kind: str) -> str:
    return KIND_WORDS.get(kind, printable_line(kind, 24))


def _colour_of_kind(kind: str) -> str:
    """Return the colour's name. A kind from a file may have any name, so only known names are used."""
    return kind if kind in KINDS else "unknown"


def _colour_of_lane(track: str) -> str:
    way = track.partition(":")[0]
    return way if way in ("evict", "fetch") else "unknown"


def _percent(one: int, whole: int) -> str:
    return f"{one / whole:.0%}" if whole else "-"
