"""Field tables: the JSON form of each frozen dataclass, and the check of each of its values.

Reading, writing and validation use one table per dataclass. So each written file can be read again, and each
value from a file is checked. A check takes a value and returns a complaint, or "" for a valid value. Decoding
takes the (key, value) pairs of one JSON object and returns the dataclass. At the first fault, decoding raises
`Fault` with the JSON path of the faulty value.
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
TICKS_END = 2**32  # each tick (index of a kernel) in a profile is smaller
Check = Callable[[Any], str]
Pairs = Sequence[tuple[str, Any]]

# Characters that a name must not contain. They are control characters (C0, DEL, C1), lone surrogates (not
# UTF-8), the byte order mark, and invisible characters that reorder or hide terminal text. A name may contain
# slashes, because names are only compared and never used as paths.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


class Fault(Exception):
    """A fault in a file: the JSON path of the faulty value, and a complaint about the value.

    Callers convert a Fault into a FileFormatError.
    """

    def __init__(self, path: str, what: str, place: tuple[int, int] | None = None) -> None:
        super().__init__(path, what)
        self.path = path
        self.what = what
        self.place = place  # (line, column) of the faulty value, both counted from 1; None if unknown


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = _Required()


def make_integer_check(low: int = 0, end: int = LIMIT) -> Check:
    """Return a check function for integers from `low` to `end` - 1. It refuses `True`, which is an int in
    Python.
    """

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
    """Return a check function for names. It refuses a name that is too short or too long.

    It also refuses characters in _UNSAFE, such as terminal control characters.
    """

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
    """Return a check function that accepts only the words in `names`."""

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
    """Return a short form of a value for a message, in the words of JSON."""
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
    """Return a hint such as `; did you mean memory?`, or "" if no name is similar.

    For a `name` of more than 64 characters, return "", because the comparison takes quadratic time.
    """
    if not isinstance(name, str) or len(name) > 64:
        return ""
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


class Field(NamedTuple):
    """The description of one key of a JSON object. The descriptions have the order of the dataclass's
    fields.
    """

    key: str
    check: Check
    default: Any = REQUIRED
    attribute: str = ""  # name of the dataclass's field, if not the key: "source" for "from"

    @property
    def attribute_name(self) -> str:
        return self.attribute or self.key


@dataclass(frozen=True, slots=True)
class ObjectFormat:
    """The description of one JSON object, and the dataclass that represents it."""

    build: Callable[..., Any]
    fields: tuple[Field, ...]
    view: Callable[[Any], Any] = lambda value: value  # converts a plain tuple to a named tuple

    def decode_pairs(self, pairs: Pairs) -> Any:
        """Build the dataclass from the pairs of one JSON object.

        A Fault that this raises has a path that begins at this object.
        """
        return self.decode_dict(_dict_of_unique_keys(pairs))

    def decode_dict(self, values: dict[str, Any]) -> Any:
        """Build the dataclass from a dict of unique keys. Empty this dict."""
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
        """Return the JSON object of a dataclass, without the fields whose value is None."""
        value = self.view(value)
        return {f.key: got for f in self.fields if (got := getattr(value, f.attribute_name)) is not None}

    def refuse_invalid_values(self, value: Any) -> None:
        """Raise a Fault for the first value of the dataclass that fails its check."""
        value = self.view(value)
        for field in self.fields:
            got = getattr(value, field.attribute_name)
            if (got is not None or field.default is not None) and (complaint := field.check(got)):
                raise Fault(f".{field.key}", complaint)


@dataclass(frozen=True, slots=True)
class TaggedObjectFormat:
    """The description of a JSON object that has one of several forms.

    The value of the object's key `key` is a tag, which selects the form. `tag_of` returns the tag for a
    dataclass.
    """

    key: str
    tags: dict[str, ObjectFormat]
    tag_of: Callable[[Any], str]

    def decode_pairs(self, pairs: Pairs) -> Any:
        """Build the dataclass for one JSON object. The tag among the pairs selects the form."""
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
    """Return the pairs of one JSON object as a dict. Raise a Fault if a key appears twice."""
    values = dict(pairs)
    if len(values) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise Fault(json_path_step(twice), "appears twice")
    return values


@dataclass(frozen=True, slots=True)
class TopLevelKey:
    """The description of one key at the top level of a file. `form` is one of these words:

    value    a number or a string that passes `check`
    names    a list of different strings that pass `check`
    record   one object
    records  a list of objects
    table    an object of objects; the outer key becomes the first field of the dataclass
    """

    key: str
    form: str
    record: Form | None = None
    check: Check | None = None
    default: Any = REQUIRED
    # 16 MiB of text hold 140,000 ordinary moves. Reading the worst file takes less than 1 s.
    count_max: int = 2**17
    since: int = 1  # the first version of the format that has this key


@dataclass(frozen=True, slots=True)
class Format:
    """The description of one kind of file: its name, its top-level keys, and its rules.

    `parts` has the keys in the order of the dataclass's fields.
    """

    name: str
    size_max_bytes: int
    build: Callable[..., Any]
    parts: tuple[TopLevelKey, ...]
    law: Callable[[Any], None]  # raises a Fault if the fields contradict each other
    version: int = 1  # the newest version of the format
    # Returns the oldest version that can hold a value. The writer writes this version, so that an older
    # teraio can read all files without new keys.
    version_of: Callable[[Any], int] = lambda value: 1


def json_path_step(key: str) -> str:
    """Return the text that a JSON path has for a key. If the key is not a plain word, quote and escape it."""
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
    """Run `act` with `value`. If it raises a Fault, put `path` before the path in the Fault."""
    try:
        return act(value)
    except Fault as fault:
        raise Fault(path + fault.path, fault.what) from None


def refuse_duplicates(path: str, names: Iterator[Any], key: str = "") -> None:
    """Raise a Fault for the first name that appears twice. `path` is the JSON path of the list of names."""
    seen: dict[Any, int] = {}
    for index, name in enumerate(names):
        if seen.setdefault(name, index) != index:
            shown_name = (
                " to ".join(map(printable_line, name)) if isinstance(name, tuple) else _short_json_text(name)
            )
            raise Fault(f"{path}[{index}]{key}", f"{shown_name} appears already at {path}[{seen[name]}]")


def encode_file_text(form: Format, value: Any) -> str:
    """Return the text of a file, which ends with a newline.

    Its keys are sorted, and each entry of a list or table is on its own line.
    """
    version = form.version_of(value)
    lines = {"format": _json(form.name), "version": _json(version)}
    for part in form.parts:
        if part.since > version:
            continue
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
