"""The page of a report: one HTML file that loads nothing. In: content. Out: HTML.

Names come from files and can be hostile, so HTML text has escaped names. In the script's data, each character
that could end the script is written as an escape sequence. Scripts insert names as text, never as HTML. The
page's content security policy allows only the page's own style and script.
"""

from __future__ import annotations

import json
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Iterator
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

from teraio import __version__
from teraio.formats.plan import Evict
from teraio.formats.timeline import Timeline

from . import picture_data
from .content import Content, Sources, Table, has_matching_profile
from .labels import KIND_WORDS, describe_lane

SCRIPTS = ("format.js", "model.js", "answer.js", "pictures.js", "page.js")
# Characters that could end a script or begin markup (`<`, `>`, `&`), and two characters that end a line in
# JavaScript but not in JSON.
UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def report_as_html(report: Content) -> str:
    folder = files("teraio.report") / "assets"

    def read_asset(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    style = read_asset("page.css")
    script = "\n".join(read_asset(name) for name in SCRIPTS)
    numbers = json.dumps(_data_for_page_scripts(report.sources), ensure_ascii=False, separators=(",", ":"))
    parts = {
        "policy": f"default-src 'none'; style-src {_hash_for_security_policy(style)}; script-src "
        f"{_hash_for_security_policy(script)}; "
        f"base-uri 'none'; form-action 'none'",
        "style": style,
        "script": script,
        "numbers": numbers.translate(UNSAFE),
        "title": escape(report.title),
        "source": escape(report.sources.name),
        "version": escape(__version__),
        "sentences": "".join(f"<p>{escape(sentence)}</p>" for sentence in report.sentences),
        "facts": "".join(_facts_as_html(report)),
        "memory_table": _table_as_html(report.memory),
        "slices_table": _table_as_html(report.slices),
        "waits": _table_as_html(report.waits) if report.waits.rows else "<p>Compute waits for nothing.</p>",
        "causes": "".join(f"<p class=note>{escape(cause)}</p>" for cause in report.causes),
        "lanes": _table_as_html(report.lanes) if report.lanes.rows else "<p>Nothing moves.</p>",
        "compared": _section_of_tables(
            "compared", "Predicted against measured", report.compared, report.drifts
        ),
        "what_if": _section_of_tables("what-if", "Changes that would make the step faster", report.what_if),
        "notes": "".join(f"<p class=note>{escape(note)}</p>" for note in report.notes),
    }
    # Fill each placeholder once. A placeholder in inserted text is therefore not replaced.
    pieces = read_asset("page.html").split("{{")
    return pieces[0] + "".join(_fill_placeholder(piece, parts) for piece in pieces[1:])


def _fill_placeholder(piece: str, parts: dict[str, str]) -> str:
    name, rest = piece.split("}}", 1)
    return parts[name] + rest


def _hash_for_security_policy(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _facts_as_html(report: Content) -> Iterator[str]:
    for fact in report.facts:
        note = f"<dd class=note>{escape(fact.note)}</dd>" if fact.note else ""
        yield f"<div><dt>{escape(fact.label)}</dt><dd class=value>{escape(fact.value)}</dd>{note}</div>"


def _section_of_tables(name: str, title: str, *tables: Table | None) -> str:
    found = "".join(_table_as_html(table) for table in tables if table is not None and table.rows)
    heading = f"<h2 id='{name}-title'>{escape(title)}</h2>"
    return f"<section id={name} aria-labelledby='{name}-title'>{heading}{found}</section>" if found else ""


def _table_as_html(table: Table) -> str:
    head = "".join(f"<th scope=col>{escape(cell)}</th>" for cell in table.head)
    body = "".join(f"<tr>{''.join(_cells_as_html(table, row))}</tr>" for row in table.rows)
    # The box around a wide table scrolls. `tabindex` lets a user of the keyboard move to this box.
    label = escape(table.caption, quote=True)
    return (
        f'<div class=scroll tabindex=0 role=group aria-label="{label}"><table>'
        f"<caption>{escape(table.caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cells_as_html(table: Table, row: tuple[str, ...]) -> Iterator[str]:
    for at, cell in enumerate(row):
        inner = escape(cell) or "&nbsp;"
        if at == table.tensors:
            inner = (
                f'<button type=button class=tensor data-tensor="{escape(cell, quote=True)}">{inner}</button>'
            )
        yield f"<th scope=row>{inner}</th>" if at == 0 else f"<td>{inner}</td>"


# ---- data for the scripts


class _NameNumbers:
    """A numbering of distinct names. A name's number is its index in the order of first use."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def number_of(self, name: str) -> int:
        return self.index.setdefault(name, len(self.index))


def _data_for_page_scripts(sources: Sources) -> dict[str, Any]:
    """Return the data for the page's scripts as columns of numbers.

    The entry `names` lists all names. In the other entries, a number replaces each name: its index in this
    list.
    """
    line, names = sources.line, _NameNumbers()
    kernels, waits, held = (
        picture_data.kernel_spans(line),
        picture_data.timed_stalls(line),
        picture_data.memory_curve(line),
    )
    step = picture_data.step_ns(line)
    known = has_matching_profile(sources)
    numbers: dict[str, Any] = {
        "step": step,
        "budget": line.budget_bytes,
        "measured": line.kind == "measured",
        "kernels": {
            "name": [names.number_of(span.name) for span in kernels],
            "start": [span.start_ns for span in kernels],
            "end": [span.end_ns for span in kernels],
            "call": [k.call for k in sources.profile.kernels] if known and sources.profile else [],
        },
        "waits": {
            "tensor": [names.number_of(wait.stall.tensor) for wait in waits],
            "start": [wait.start_ns for wait in waits],
            "ns": [wait.stall.ns for wait in waits],
            "tick": [wait.stall.tick for wait in waits],
            "cause": [names.number_of(wait.stall.cause) for wait in waits],
        },
        "memory": {
            "kinds": list(held.kinds),
            "words": [KIND_WORDS.get(kind, kind) for kind in held.kinds],
            "at": list(held.at_ns),
            "bytes": [list(column) for column in zip(*held.bytes)] if held.bytes else [],
        },
    }
    numbers |= _move_columns(line, names)
    numbers["drops"] = _drop_columns(sources, names)
    numbers["predicted"] = (
        _predicted_curve_over_measured_time(sources.predicted, line) if sources.predicted else None
    )
    numbers["tensors"] = _tensor_columns(sources, names) if sources.profile and known else None
    numbers["names"] = list(names.index)
    return numbers


def _move_columns(line: Timeline, names: _NameNumbers) -> dict[str, Any]:
    lanes, rows = [], []
    for number, (track, spans) in enumerate(picture_data.spans_by_lane(line).items()):
        placed = picture_data.assign_rows_without_overlap(spans)
        lanes.append({"track": track, "words": describe_lane(track), "rows": max(placed, default=0) + 1})
        rows += [
            (number, row, names.number_of(s.tensor or s.name), s.start_ns, s.end_ns, s.bytes)
            for s, row in zip(spans, placed)
        ]
    columns = ("lane", "row", "tensor", "start", "end", "bytes")
    rows.sort(key=lambda row: row[3])
    return {
        "lanes": lanes,
        "moves": {name: [row[at] for row in rows] for at, name in enumerate(columns)},
    }


def _drop_columns(sources: Sources, names: _NameNumbers) -> dict[str, list[int]]:
    """Return the drops of tensors whose slow tier already has the same bytes.

    A predicted timeline contains no drops, so take the drops from its plan.
    """
    line = sources.line
    found = [(span.tensor, span.start_ns) for span in line.spans if span.track.startswith("drop:")]
    kernels = picture_data.kernel_spans(line)
    if line.kind == "predicted" and sources.plan is not None and kernels:
        found = [
            (move.tensor, kernels[move.free % len(kernels)].start_ns)
            for move in sources.plan.moves
            if isinstance(move, Evict) and move.trigger is None
        ]
    return {"tensor": [names.number_of(name) for name, _ in found], "at": [at for _, at in found]}


def _predicted_curve_over_measured_time(line: Timeline, onto: Timeline) -> dict[str, Any]:
    """Return the predicted memory over the time of the measured step, so that one picture can show both
    steps.

    If both timelines have the same kernels, move each predicted moment into the measured span of its kernel.
    Otherwise, keep the predicted times.
    """
    held, at_ns = picture_data.memory_curve(line), list[int]()
    planned, got = picture_data.kernel_spans(line), picture_data.kernel_spans(onto)
    if [span.name for span in planned] != [span.name for span in got]:
        return {
            "at": list(held.at_ns),
            "bytes": held.total_bytes_by_moment(),
            "step": picture_data.step_ns(line),
        }
    starts = [span.start_ns for span in planned]
    for at in held.at_ns:
        tick = max(bisect_right(starts, at) - 1, 0)
        at_ns.append(
            got[tick].start_ns + max(0, min(at - starts[tick], got[tick].end_ns - got[tick].start_ns))
        )
    return {"at": at_ns, "bytes": held.total_bytes_by_moment(), "step": picture_data.step_ns(onto)}


def _tensor_columns(sources: Sources, names: _NameNumbers) -> dict[str, list[Any]]:
    assert sources.profile is not None
    tensors = sources.profile.tensors
    return {
        "name": [names.number_of(tensor.name) for tensor in tensors],
        "kind": [tensor.kind for tensor in tensors],
        "bytes": [tensor.size_bytes for tensor in tensors],
        "persistent": [int(tensor.persistent) for tensor in tensors],
        "born": [-1 if tensor.born is None else tensor.born for tensor in tensors],
        "reads": [list(tensor.reads) for tensor in tensors],
        "writes": [list(tensor.writes) for tensor in tensors],
    }
