"""A strict JSON reader that works window by window. In: text in pieces. Out: dataclasses of a format.

A file has at most four levels of nesting, so the reader needs no recursion. One regular expression matches as
many whole entries of a list as the window holds. Its repetitions never backtrack, so matching takes linear
time. Then Python's JSON decoder decodes the entries one by one, and the reader checks each entry before the
next is decoded. If text does not match the expression, `json_errors.py` explains the fault. The reader needs
memory for one window, and for the valid entries before the first fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from teraio.formats import json_errors
from teraio.formats.fields import (
    REQUIRED,
    Fault,
    Format,
    ObjectFormat,
    TopLevelKey,
    json_path_step,
    suggest_nearest_name,
)
from teraio.formats.json_errors import INSIDE, ONCE
from teraio.units import printable_line

ENTRY_CHARS_MAX = 2**20  # most characters of one list entry, such as a tensor with all its uses
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
    """A position in text that arrives in pieces.

    The cursor keeps a window of text that follows the position. It discards the text before the position.
    """

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces = pieces
        self.text = ""
        self.pos = 0
        self.at_end = False
        self._lines = 0  # number of line ends before the window
        self._column = 0  # characters between the last line end and the window's start
        self.fill_window()
        self.head = self.text[:HEAD_CHARS]

    def fill_window(self) -> None:
        """Read pieces until the window holds the longest possible entry, or the rest of the text."""
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

    def line_and_column(self, pos: int) -> tuple[int, int]:
        """Return the place in the whole text of a position in the window: line and column, from 1."""
        ends = self.text.count("\n", 0, pos)
        column = pos - self.text.rfind("\n", 0, pos) + (0 if ends else self._column)
        return self._lines + ends + 1, column

    def peek_after_whitespace(self) -> str:
        """Skip white space. Return the next character without consuming it, or "" at the end."""
        self.fill_window()
        match = SPACE.match(self.text, self.pos)
        assert match is not None
        self.pos = match.end()
        self.fill_window()
        return self.text[self.pos : self.pos + 1]

    def consume_mark(self, marks: str, path: str) -> str:
        """Consume the next character and return it. Raise a Fault if it is not in `marks`."""
        mark = self.peek_after_whitespace()
        if not mark or mark not in marks:
            raise self.fault_at(
                path, self.pos, json_errors.describe_unexpected_mark(self.text, self.pos, " or ".join(marks))
            )
        self.pos += 1
        return mark

    def consume_match(self, pattern: re.Pattern[str], path: str, expected: str) -> str:
        """Consume the text that matches the pattern, and return it. If the text does not match, raise a Fault
        that explains why.
        """
        self.peek_after_whitespace()
        match = pattern.match(self.text, self.pos)
        if match is None:
            raise self.fault_for_mismatch(path, expected)
        self.pos = match.end()
        return match[0]

    def fault_at(self, path: str, pos: int, what: str) -> Fault:
        return Fault(path, what, self.line_and_column(pos))

    def fault_for_mismatch(self, path: str, expected: str) -> Fault:
        """Return a Fault that explains how the text at the cursor differs from `expected`."""
        below, pos, what = json_errors.explain_mismatch(self.text, self.pos, self.at_end, expected)
        return self.fault_at(path + below, pos, what)


def parse_document(form: Format, cursor: Cursor, *, make: bool) -> Any:
    """Parse the whole text and return the dataclass. If `make` is False, only check the structure and return
    None.
    """
    parts = {part.key: part for part in form.parts}
    values: dict[str, Any] = {}
    cursor.consume_mark("{", "")
    more = cursor.peek_after_whitespace() != "}" or cursor.consume_mark("}", "") != "}"
    while more:
        at = cursor.pos
        key = json.loads(cursor.consume_match(STRING, "", "key"))
        if key in values:
            raise cursor.fault_at(json_path_step(key).lstrip("."), at, "appears twice")
        cursor.consume_mark(":", printable_line(key, 40))
        if key in ("format", "version"):
            values[key] = _parse_header_value(form, cursor, key)
        elif key in parts:
            values[key] = _parse_top_level_value(parts[key], cursor, make)
        else:
            known = ["format", "version", *parts]
            what = f"is unknown{suggest_nearest_name(key, known)}; known keys are {', '.join(known)}"
            raise cursor.fault_at(json_path_step(key).lstrip("."), at, what)
        more = cursor.consume_mark(",}", "") == ","
    if cursor.peek_after_whitespace():
        raise cursor.fault_at("", cursor.pos, "something follows the end of the object; expected nothing")
    for key in ("format", "version", *(part.key for part in form.parts if part.default is REQUIRED)):
        if key not in values:
            raise Fault(key, "is missing")
    value = form.build(*(values.get(part.key, part.default) for part in form.parts)) if make else None
    for part in form.parts:
        if part.key in values and part.since > values["version"]:
            what = f"is a key of version {part.since}; the version of this file is {values['version']}"
            raise Fault(part.key, what)
    if make and (needed := form.version_of(value)) > values["version"]:
        raise Fault("version", f"is {values['version']}, but an entry has a key of version {needed}")
    return value


def _parse_header_value(form: Format, cursor: Cursor, key: str) -> Any:
    cursor.peek_after_whitespace()
    at = cursor.pos
    got = json.loads(cursor.consume_match(SCALAR, key, "value"))
    if what := header_complaint(form, key, got):
        raise cursor.fault_at(key, at, what)
    return got


def header_complaint(form: Format, key: str, got: Any) -> str:
    """Return a complaint if `got` is a wrong value for the key `format` or `version`, else ""."""
    shown_got = f'"{printable_line(got)}"' if isinstance(got, str) else printable_line(got)
    if key == "format":
        return "" if got == form.name else f'is {shown_got}; expected "{form.name}": another kind of file'
    if type(got) is int and 1 <= got <= form.version:
        return ""
    remedy = (
        "; a newer teraio wrote it: upgrade teraio, or write it again" if type(got) is int and got else ""
    )
    known = "version 1" if form.version == 1 else f"versions 1 to {form.version}"
    return f"is {shown_got}; this teraio reads {known}{remedy}"


def _parse_top_level_value(part: TopLevelKey, cursor: Cursor, make: bool) -> Any:
    """Parse the value of one top-level key."""
    cursor.peek_after_whitespace()
    at = cursor.pos
    if part.form == "value":
        assert part.check is not None
        got = json.loads(cursor.consume_match(SCALAR, part.key, "value"))
        if complaint := part.check(got):
            raise cursor.fault_at(part.key, at, complaint)
        return got
    if part.form == "record":
        return (
            _parse_object(part, cursor, part.key, ())
            if make
            else cursor.consume_match(RECORD, part.key, "entry")
        )
    if part.form == "table":
        return _parse_table(part, cursor)
    return _parse_list(part, cursor, make)


def _parse_object(part: TopLevelKey, cursor: Cursor, path: str, first: tuple[tuple[str, Any], ...]) -> Any:
    """Parse one object, and build its dataclass from the pairs in `first` and the object's own pairs."""
    assert part.record is not None
    text = cursor.consume_match(RECORD, path, "entry")
    at = cursor.pos - len(text)
    try:
        return part.record.decode_pairs([*first, *json.loads(text, object_pairs_hook=list)])
    except Fault as fault:
        raise cursor.fault_at(path + fault.path, at, fault.what) from None


def _parse_table(part: TopLevelKey, cursor: Cursor) -> tuple[Any, ...]:
    """Parse an object whose values are objects. Return the rows, sorted by the outer key."""
    assert isinstance(part.record, ObjectFormat)
    first = part.record.fields[0].key
    rows: list[Any] = []
    cursor.consume_mark("{", part.key)
    more = cursor.peek_after_whitespace() != "}" or cursor.consume_mark("}", part.key) != "}"
    while more:
        if len(rows) >= part.count_max:
            raise cursor.fault_at(part.key, cursor.pos, f"has more than {part.count_max} entries")
        name = json.loads(cursor.consume_match(STRING, part.key, "key"))
        cursor.consume_mark(":", part.key)
        rows.append(_parse_object(part, cursor, part.key + json_path_step(name), ((first, name),)))
        more = cursor.consume_mark(",}", part.key) == ","
    return tuple(sorted(rows, key=lambda row: str(getattr(row, first))))


def _parse_list(part: TopLevelKey, cursor: Cursor, make: bool) -> tuple[Any, ...]:
    """Parse a list of objects or names. If `make` is False, check only the structure and return an empty
    tuple.
    """
    entries: list[Any] = []
    pattern, expected = (STRINGS, "name") if part.form == "names" else (RECORDS, "entry")
    cursor.consume_mark("[", part.key)
    more = cursor.peek_after_whitespace() != "]" or cursor.consume_mark("]", part.key) != "]"
    while more:
        cursor.peek_after_whitespace()
        match = pattern.match(cursor.text, cursor.pos)
        if match is None:
            # Without `make`, the reader does not count entries. The line number in the fault still locates
            # the entry, because files have one entry per line.
            index = str(len(entries)) if make else "..."
            raise cursor.fault_for_mismatch(f"{part.key}[{index}]", expected)
        if make:
            _decode_entries(part, cursor, match[0], entries)
        cursor.pos = match.end()
        more = cursor.consume_mark(",]", part.key) == ","
    return tuple(entries)


def _decode_entries(part: TopLevelKey, cursor: Cursor, text: str, entries: list[Any]) -> None:
    """Decode `text`, which begins at the cursor, and append its entries. Check each entry before the next is
    decoded.
    """
    start = len(entries)
    try:
        if part.record is None:
            for name in json.loads(f"[{text}]"):
                _check_and_append_entry(part, name, entries)
        else:
            decode = part.record.decode_pairs
            json.loads(
                f"[{text}]",
                object_pairs_hook=lambda pairs: _check_and_append_entry(part, decode(pairs), entries),
            )
    except Fault as fault:
        pattern = STRING if part.record is None else RECORD
        places = pattern.finditer(cursor.text, cursor.pos)
        at = next(place for index, place in enumerate(places, start) if index == len(entries)).start()
        raise cursor.fault_at(f"{part.key}[{len(entries)}]{fault.path}", at, fault.what) from None


def _check_and_append_entry(part: TopLevelKey, entry: Any, entries: list[Any]) -> None:
    if part.check and (complaint := part.check(entry)):
        raise Fault("", complaint)
    if len(entries) >= part.count_max:
        raise Fault("", f"is one too many; at most {part.count_max} entries are taken")
    entries.append(entry)
