"""Strict JSON, window by window: text in pieces comes in, dataclasses go out, by the tables of a format.

The grammar is the format's own and at most four levels deep, so nothing here recurses: one regular expression
matches as many whole entries of a list as the window holds (possessive, so linear), then Python's JSON
decoder makes them, each checked before the next. What the expressions do not match is a fault;
`json_errors.py` says which. Memory is that of the good entries before the first fault, plus one window.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from teraio.formats import json_errors
from teraio.formats.fields import REQUIRED, Fault, Format, Part, Record, nearest, path_key
from teraio.formats.json_errors import INSIDE, ONCE
from teraio.units import shown

ENTRY_CHARS_MAX = 2**20  # one entry of a list: a tensor with all its uses
WINDOW_CHARS = 2 * ENTRY_CHARS_MAX
HEAD_CHARS = 4096

_WS = r"[ \t\n\r]*+"
_STRING = f'"{INSIDE}"'
_INTEGER = r"(?:0|[1-9][0-9]{0,15}+)(?![0-9.eE])"
_INTEGERS = rf"\[{_WS}(?:{_INTEGER}(?:{_WS},{_WS}{_INTEGER})*{ONCE}{_WS})?{ONCE}\]"
_PAIR = rf"{_STRING}{_WS}:{_WS}(?:{_INTEGER}|{_STRING}|{_INTEGERS}|true|false)"
_RECORD = rf"\{{{_WS}(?:{_PAIR}(?:{_WS},{_WS}{_PAIR})*{ONCE}{_WS})?{ONCE}\}}"

SPACE = re.compile(_WS)
STRING = re.compile(_STRING)
SCALAR = re.compile(rf"{_STRING}|{_INTEGER}")
RECORD = re.compile(_RECORD)
RECORDS = re.compile(rf"{_RECORD}(?:{_WS},{_WS}{_RECORD})*{ONCE}")
STRINGS = re.compile(rf"{_STRING}(?:{_WS},{_WS}{_STRING})*{ONCE}")


class Cursor:
    """A place in text that arrives in pieces; a window ahead is in memory, what lies behind is forgotten."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces = pieces
        self.text = ""
        self.pos = 0
        self.at_end = False
        self._lines = 0  # line ends in the text that was forgotten
        self._column = 0  # characters after the last of them
        self.fill()
        self.head = self.text[:HEAD_CHARS]

    def fill(self) -> None:
        """Let the window hold at least one longest entry, or the rest of the text."""
        ahead = len(self.text) - self.pos
        if self.at_end or ahead >= ENTRY_CHARS_MAX:
            return
        ends = self.text.count("\n", 0, self.pos)
        self._lines += ends
        self._column = self.pos - self.text.rfind("\n", 0, self.pos) - 1 + (0 if ends else self._column)
        parts = [self.text[self.pos :]]
        while ahead < WINDOW_CHARS:
            piece = next(self._pieces, None)
            if piece is None:
                self.at_end = True
                break
            parts.append(piece)
            ahead += len(piece)
        self.text, self.pos = "".join(parts), 0

    def place(self, pos: int) -> tuple[int, int]:
        """Line and column of a position in the window, both from 1."""
        ends = self.text.count("\n", 0, pos)
        column = pos - self.text.rfind("\n", 0, pos) + (0 if ends else self._column)
        return self._lines + ends + 1, column

    def peek(self) -> str:
        """The next character that is not white space, or "" at the end."""
        self.fill()
        match = SPACE.match(self.text, self.pos)
        assert match is not None
        self.pos = match.end()
        self.fill()
        return self.text[self.pos : self.pos + 1]

    def take(self, marks: str, path: str) -> str:
        """One of a few marks, which is consumed."""
        mark = self.peek()
        if not mark or mark not in marks:
            raise self.fault(path, self.pos, json_errors.instead(self.text, self.pos, " or ".join(marks)))
        self.pos += 1
        return mark

    def match(self, pattern: re.Pattern[str], path: str, expected: str) -> str:
        """The text that matches here, which is consumed; a Fault that explains why if nothing does."""
        self.peek()
        match = pattern.match(self.text, self.pos)
        if match is None:
            raise self.explained(path, expected)
        self.pos = match.end()
        return match[0]

    def fault(self, path: str, pos: int, what: str) -> Fault:
        return Fault(path, what, self.place(pos))

    def explained(self, path: str, expected: str) -> Fault:
        """The Fault for what stands here in the place of something expected."""
        below, pos, what = json_errors.explain(self.text, self.pos, self.at_end, expected)
        return self.fault(path + below, pos, what)


def walk(form: Format, cursor: Cursor, *, make: bool) -> Any:
    """The whole text -> the dataclass; without `make` its structure is checked and nothing kept."""
    parts = {part.key: part for part in form.parts}
    values: dict[str, Any] = {}
    cursor.take("{", "")
    more = cursor.peek() != "}" or cursor.take("}", "") != "}"
    while more:
        at = cursor.pos
        key = json.loads(cursor.match(STRING, "", "key"))
        if key in values:
            raise cursor.fault(path_key(key).lstrip("."), at, "appears twice")
        cursor.take(":", shown(key, 40))
        if key in ("format", "version"):
            values[key] = _header(form, cursor, key)
        elif key in parts:
            values[key] = _part(parts[key], cursor, make)
        else:
            known = ["format", "version", *parts]
            what = f"is unknown{nearest(key, known)}; known keys are {', '.join(known)}"
            raise cursor.fault(path_key(key).lstrip("."), at, what)
        more = cursor.take(",}", "") == ","
    if cursor.peek():
        raise cursor.fault("", cursor.pos, "something follows the end of the object; expected nothing")
    for key in ("format", "version", *(part.key for part in form.parts if part.default is REQUIRED)):
        if key not in values:
            raise Fault(key, "is missing")
    return form.build(*(values.get(part.key, part.default) for part in form.parts)) if make else None


def _header(form: Format, cursor: Cursor, key: str) -> Any:
    cursor.peek()
    at = cursor.pos
    got = json.loads(cursor.match(SCALAR, key, "value"))
    if what := header_complaint(form, key, got):
        raise cursor.fault(key, at, what)
    return got


def header_complaint(form: Format, key: str, got: Any) -> str:
    """What is wrong with a file's `format` or `version`, or ""."""
    shown_got = f'"{shown(got)}"' if isinstance(got, str) else shown(got)
    if key == "format":
        return "" if got == form.name else f'is {shown_got}; expected "{form.name}": another kind of file'
    if got == form.version and type(got) is int:
        return ""
    remedy = (
        "; a newer teraio wrote it: upgrade teraio, or write it again" if type(got) is int and got else ""
    )
    return f"is {shown_got}; this teraio reads version {form.version}{remedy}"


def _part(part: Part, cursor: Cursor, make: bool) -> Any:
    """The value of one key at the top."""
    cursor.peek()
    at = cursor.pos
    if part.form == "value":
        assert part.check is not None
        got = json.loads(cursor.match(SCALAR, part.key, "value"))
        if complaint := part.check(got):
            raise cursor.fault(part.key, at, complaint)
        return got
    if part.form == "record":
        return _one(part, cursor, part.key, ()) if make else cursor.match(RECORD, part.key, "entry")
    if part.form == "table":
        return _table(part, cursor)
    return _entries(part, cursor, make)


def _one(part: Part, cursor: Cursor, path: str, first: tuple[tuple[str, Any], ...]) -> Any:
    """One object; `first` goes before its pairs."""
    assert part.record is not None
    text = cursor.match(RECORD, path, "entry")
    at = cursor.pos - len(text)
    try:
        return part.record.decode([*first, *json.loads(text, object_pairs_hook=list)])
    except Fault as fault:
        raise cursor.fault(path + fault.path, at, fault.what) from None


def _table(part: Part, cursor: Cursor) -> tuple[Any, ...]:
    """An object of objects, sorted by the outer key."""
    assert isinstance(part.record, Record)
    first = part.record.fields[0].key
    rows: list[Any] = []
    cursor.take("{", part.key)
    more = cursor.peek() != "}" or cursor.take("}", part.key) != "}"
    while more:
        if len(rows) >= part.count_max:
            raise cursor.fault(part.key, cursor.pos, f"has more than {part.count_max} entries")
        name = json.loads(cursor.match(STRING, part.key, "key"))
        cursor.take(":", part.key)
        rows.append(_one(part, cursor, part.key + path_key(name), ((first, name),)))
        more = cursor.take(",}", part.key) == ","
    return tuple(sorted(rows, key=lambda row: str(getattr(row, first))))


def _entries(part: Part, cursor: Cursor, make: bool) -> tuple[Any, ...]:
    """A list of objects or of names, a window at a time."""
    entries: list[Any] = []
    pattern, expected = (STRINGS, "name") if part.form == "names" else (RECORDS, "entry")
    cursor.take("[", part.key)
    more = cursor.peek() != "]" or cursor.take("]", part.key) != "]"
    while more:
        cursor.peek()
        match = pattern.match(cursor.text, cursor.pos)
        if match is None:
            # Without `make` nobody has counted; the line tells where, as files have one entry per line.
            index = str(len(entries)) if make else "..."
            raise cursor.explained(f"{part.key}[{index}]", expected)
        if make:
            _decode(part, cursor, match[0], entries)
        cursor.pos = match.end()
        more = cursor.take(",]", part.key) == ","
    return tuple(entries)


def _decode(part: Part, cursor: Cursor, text: str, entries: list[Any]) -> None:
    """Add the entries in `text`, which stands at the cursor; each is checked before the next is made."""
    start = len(entries)
    try:
        if part.record is None:
            for name in json.loads(f"[{text}]"):
                _add(part, name, entries)
        else:
            decode = part.record.decode
            json.loads(f"[{text}]", object_pairs_hook=lambda pairs: _add(part, decode(pairs), entries))
    except Fault as fault:
        pattern = STRING if part.record is None else RECORD
        places = pattern.finditer(cursor.text, cursor.pos)
        at = next(place for index, place in enumerate(places, start) if index == len(entries)).start()
        raise cursor.fault(f"{part.key}[{len(entries)}]{fault.path}", at, fault.what) from None


def _add(part: Part, entry: Any, entries: list[Any]) -> None:
    if part.check and (complaint := part.check(entry)):
        raise Fault("", complaint)
    if len(entries) >= part.count_max:
        raise Fault("", f"is one too many; at most {part.count_max} entries are taken")
    entries.append(entry)
