"""Field tables: the JSON form of each frozen dataclass, and the check of each of its values.

One table per type serves reading, writing and validation. Every written file can therefore be read, and every
value from a file is checked. A check takes a value and returns a complaint, or "" for a valid value. Decoding
takes the pairs of one JSON object and returns the dataclass. At the first fault, decoding raises `Fault` with
the JSON path of the fault.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from teraio.units import LIMIT, printable_line

TEXT_CHARS_MAX = 1024
TICKS_END = 2**32  # all ticks of a profile are smaller
Check = Callable[[Any], str]
Pairs = Sequence[tuple[str, Any]]

# Characters that a name must not contain: control characters (C0, DEL, C1), lone surrogates (not UTF-8), the
# byte order mark, and invisible characters that reorder or hide terminal text. All other characters are
# allowed. Slashes are allowed, too, because names are only compared and never used as paths.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


class Fault(Exception):
    """A fault in a file: its JSON path and a complaint. Callers convert a fault into a FileFormatError."""

    def __init__(self, path: str, what: str, place: tuple[int, int] | None = None) -> None:
        super().__init__(path, what)
        self.path = path
        self.what = what
        self.place = place  # line and column, both counted from 1, if known


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = _Required()


def make_integer_check(low: int = 0, end: int = LIMIT) -> Check:
    """Return a check for an integer in [low, end). `True` is not an integer."""

    def complaint_of_value(value: Any) -> str:
        if type(value) is not int:
            return f"is {_short_json_text(value)}; expected an integer"
        return (
            ""
            if low <= value < end
            else f"is {_short_json_text(value)}; expected an integer in [{low}, {end})"
        )

    return complaint_of_value


def make_safe_text_check(chars_min: int = 1, chars_max: int = TEXT_CHARS_MAX) -> Check:
    """Return a check for a name of bounded length without terminal control characters."""

    def complaint_of_value(value: Any) -> str:
        if type(value) is not str:
            return f"is {_short_json_text(value)}; expected a string"
        if not chars_min <= len(value) <= chars_max:
            return f"has {len(value)} characters; expected {chars_min} to {chars_max}"
        if not (value.isascii() and value.isprintable()) and (unsafe := _UNSAFE.search(value)):
            return (
                f"holds {printable_line(unsafe[0])} in {_short_json_text(value)}; control characters "
                "are refused in names"
            )
        return ""

    return complaint_of_value


def make_one_of_check(*names: str) -> Check:
    """Return a check for one of a few words."""

    def complaint_of_value(value: Any) -> str:
        if type(value) is str and value in names:
            return ""
        return (
            f"is {_short_json_text(value)}; expected one of {', '.join(names)}"
            f"{suggest_nearest_name(value, names)}"
        )

    return complaint_of_value


def boolean_complaint(value: Any) -> str:
    """Return a complaint unless the value is `true` or `false`."""
    return "" if type(value) is bool else f"is {_short_json_text(value)}; expected true or false"


def ticks_complaint(value: Any) -> str:
    """Return a complaint unless the value is a list of ascending ticks without duplicates."""
    if type(value) is not tuple:
        return f"is {_short_json_text(value)}; expected a list of ticks"
    last = -1
    for tick in value:
        if type(tick) is not int or not 0 <= tick < TICKS_END:
            return f"holds {_short_json_text(tick)}; expected integers in [0, {TICKS_END})"
        if tick <= last:
            return f"holds {tick} after {last}; ticks ascend and appear once"
        last = tick
    return ""


def _short_json_text(value: Any) -> str:
    """Return a value in short JSON."""
    match value:
        case str():
            return f'"{printable_line(value)}"'
        case bool():
            return str(value).lower()
        case None:
            return "null"
        case list() | tuple():
            return f"a list of {len(value)}"
        case _:
            return printable_line(value)


def suggest_nearest_name(name: Any, names: Sequence[str]) -> str:
    """Return a hint such as `; did you mean memory?`, or "". Ignore long names, because comparing them takes
    quadratic time.
    """
    if not isinstance(name, str) or len(name) > 64:
        return ""
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


class Field(NamedTuple):
    """One key of an object in a file. Keys have the order of the dataclass's fields."""

    key: str
    check: Check
    default: Any = REQUIRED
    attribute: str = ""  # the dataclass's field, if its name is not the key, such as "source" for "from"

    @property
    def attribute_name(self) -> str:
        return self.attribute or self.key


@dataclass(frozen=True, slots=True)
class ObjectFormat:
    """The form of one object in a file, and the dataclass that reading returns."""

    build: Callable[..., Any]
    fields: tuple[Field, ...]
    view: Callable[[Any], Any] = lambda value: value  # converts a plain tuple to a named tuple

    def decode_pairs(self, pairs: Pairs) -> Any:
        """Build the dataclass from the pairs of one JSON object. A Fault's path is relative to the object."""
        return self.decode_dict(_dict_of_unique_keys(pairs))

    def decode_dict(self, values: dict[str, Any]) -> Any:
        """Build the dataclass from a dict of unique keys, and remove all keys from the dict."""
        arguments = []
        for key, check, default, _ in self.fields:
            value = values.pop(key, REQUIRED)
            if value is REQUIRED:
                if default is REQUIRED:
                    self._refuse_unknown_keys(values)
                    raise Fault(f".{key}", "is missing")
                value = default
            else:
                if type(value) is list:
                    value = tuple(value)
                if complaint := check(value):
                    raise Fault(f".{key}", complaint)
            arguments.append(value)
        if values:
            self._refuse_unknown_keys(values)
        return self.build(*arguments)

    def _refuse_unknown_keys(self, values: dict[str, Any]) -> None:
        known = [field.key for field in self.fields]
        for key in values:
            if key not in known:
                raise Fault(
                    json_path_step(key),
                    f"is unknown{suggest_nearest_name(key, known)}; known keys are {', '.join(known)}",
                )

    def json_object_of_value(self, value: Any) -> dict[str, Any]:
        """Return the JSON object of a dataclass, without the fields that are None."""
        value = self.view(value)
        return {f.key: got for f in self.fields if (got := getattr(value, f.attribute_name)) is not None}

    def refuse_invalid_values(self, value: Any) -> None:
        """Raise a Fault for the first value that its field refuses."""
        value = self.view(value)
        for field in self.fields:
            got = getattr(value, field.attribute_name)
            if (got is not None or field.default is not None) and (complaint := field.check(got)):
                raise Fault(f".{field.key}", complaint)


@dataclass(frozen=True, slots=True)
class TaggedObjectFormat:
    """The form of objects of several kinds.

    The value of `key` is a tag, which names an object's kind. `tag_of` returns the tag of a dataclass.
    """

    key: str
    tags: dict[str, ObjectFormat]
    tag_of: Callable[[Any], str]

    def decode_pairs(self, pairs: Pairs) -> Any:
        """Build the dataclass that the tag among the pairs selects."""
        values = _dict_of_unique_keys(pairs)
        tag = values.pop(self.key, None)
        record = self.tags.get(tag) if type(tag) is str else None
        if record is None:
            what = (
                make_one_of_check(*self.tags)(tag)
                if tag is not None
                else f"is missing; expected {' or '.join(self.tags)}"
            )
            raise Fault(f".{self.key}", what)
        return record.decode_dict(values)

    def json_object_of_value(self, value: Any) -> dict[str, Any]:
        tag = self.tag_of(value)
        return {self.key: tag} | self.tags[tag].json_object_of_value(value)

    def refuse_invalid_values(self, value: Any) -> None:
        self.tags[self.tag_of(value)].refuse_invalid_values(value)


Form = ObjectFormat | TaggedObjectFormat


def _dict_of_unique_keys(pairs: Pairs) -> dict[str, Any]:
    """Return the pairs of one JSON object as a dict; refuse a key that appears twice."""
    values = dict(pairs)
    if len(values) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise Fault(json_path_step(twice), "appears twice")
    return values


@dataclass(frozen=True, slots=True)
class TopLevelKey:
    """One key at the top of a file. `form` is the form of its value:

    value    a number or a string that passes `check`
    names    a list of different strings that pass `check`
    record   one object
    records  a list of objects
    table    an object of objects; the outer key becomes the record's first field
    """

    key: str
    form: str
    record: Form | None = None
    check: Check | None = None
    default: Any = REQUIRED
    count_max: int = 2**17  # 16 MiB hold 140,000 ordinary moves; reading the worst file takes under 1 s


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of file: its name, its top-level keys in the order of the dataclass's fields, and `law`, the
    check of rules that involve several fields.
    """

    name: str
    size_max_bytes: int
    build: Callable[..., Any]
    parts: tuple[TopLevelKey, ...]
    law: Callable[[Any], None]  # checks rules that involve several fields; raises a Fault
    version: int = 1


def json_path_step(key: str) -> str:
    """Return one step of a JSON path; quote and escape a key that is not a plain word."""
    return (
        f".{key}" if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,40}", key) else f'["{printable_line(key, 40)}"]'
    )


def validate(form: Format, value: Any) -> None:
    """Raise a Fault for the first part of `value` that breaks a rule of the format."""
    for part in form.parts:
        _validate_top_level_value(part, getattr(value, part.key))
    form.law(value)


def _validate_top_level_value(part: TopLevelKey, got: Any) -> None:
    if part.form == "value":
        assert part.check is not None
        if complaint := part.check(got):
            raise Fault(part.key, complaint)
        return
    if part.form == "record":
        assert part.record is not None
        _call_prefixing_faults(part.key, part.record.refuse_invalid_values, got)
        return
    if type(got) is not tuple:
        raise Fault(part.key, f"is a {type(got).__name__}; expected a tuple")
    if len(got) > part.count_max:
        raise Fault(part.key, f"has {len(got)} entries; at most {part.count_max} are taken")
    for index, entry in enumerate(got):
        if part.form == "names":
            assert part.check is not None
            if complaint := part.check(entry):
                raise Fault(f"{part.key}[{index}]", complaint)
        else:
            assert part.record is not None
            _call_prefixing_faults(f"{part.key}[{index}]", part.record.refuse_invalid_values, entry)


def _call_prefixing_faults(path: str, act: Callable[[Any], Any], value: Any) -> Any:
    """Run `act`. If it raises a Fault, put `path` before the path of the Fault."""
    try:
        return act(value)
    except Fault as fault:
        raise Fault(path + fault.path, fault.what) from None


def refuse_duplicates(path: str, names: Iterator[Any], key: str = "") -> None:
    """Raise a Fault for the first name that appears twice. `path` is the path of the list."""
    seen: dict[Any, int] = {}
    for index, name in enumerate(names):
        if seen.setdefault(name, index) != index:
            shown_name = (
                " to ".join(map(printable_line, name)) if isinstance(name, tuple) else _short_json_text(name)
            )
            raise Fault(f"{path}[{index}]{key}", f"{shown_name} appears already at {path}[{seen[name]}]")


def encode_file_text(form: Format, value: Any) -> str:
    """Return the text of a file: sorted keys, one entry of a list or table per line, a final newline."""
    lines = {"format": _json(form.name), "version": _json(form.version)}
    for part in form.parts:
        got = getattr(value, part.key)
        if part.form == "value":
            lines[part.key] = _json(got)
        elif part.form == "record":
            assert part.record is not None
            lines[part.key] = _json(part.record.json_object_of_value(got))
        elif part.form == "names":
            lines[part.key] = _join_one_per_line("[", [_json(name) for name in got], "]")
        elif part.form == "records":
            assert part.record is not None
            lines[part.key] = _join_one_per_line(
                "[", [_json(part.record.json_object_of_value(entry)) for entry in got], "]"
            )
        else:
            assert isinstance(part.record, ObjectFormat)
            lines[part.key] = _table_text(part.record, got)
    return "{\n" + ",\n".join(f"{_json(key)}:{lines[key]}" for key in sorted(lines)) + "\n}\n"


def _table_text(record: ObjectFormat, rows: Sequence[Any]) -> str:
    first = record.fields[0].key
    objects = sorted((entry.pop(first), entry) for entry in map(record.json_object_of_value, rows))
    return _join_one_per_line("{", [f"{_json(name)}:{_json(entry)}" for name, entry in objects], "}")


def _join_one_per_line(left: str, entries: list[str], right: str) -> str:
    return left + "\n" + ",\n".join(entries) + "\n" + right if entries else left + right


_json = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False).encode
