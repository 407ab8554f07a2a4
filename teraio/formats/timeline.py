"""A timeline: what happened, or what is predicted. One type for both, so that the two can be laid side by
side.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from teraio.formats import files
from teraio.formats.fields import (
    TICKS_END,
    Fault,
    Field,
    Format,
    ObjectFormat,
    TopLevelKey,
    make_integer_check,
    make_one_of_check,
    make_safe_text_check,
)

ENTRIES_MAX = 2**17  # spans, counters and stalls: what 16 MiB hold


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on a track: `compute`, or a lane such as `evict:ssd`."""

    track: str
    name: str
    start_ns: int
    end_ns: int
    bytes: int = 0
    tensor: str = ""


@dataclass(frozen=True, slots=True)
class Counter:
    """Bytes of one kind in one tier from `at_ns` on."""

    tier: str
    kind: str
    at_ns: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Stall:
    """Compute waiting for a ticket. `cause`: late read, link busy, miss."""

    tick: int
    tensor: str
    ns: int
    cause: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step: `budget_bytes` and `step_ns` are 0 where they are not known.

    `overrun_bytes` is what user code, or a library's kernel, got beyond the budget; no counter has it.
    """

    kind: Literal["measured", "predicted"]
    spans: tuple[Span, ...] = ()
    counters: tuple[Counter, ...] = ()
    stalls: tuple[Stall, ...] = ()
    budget_bytes: int = 0
    step_ns: int = 0
    overrun_bytes: int = 0

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Timeline:
        """From a file, plain or gzip; FileFormatError names the file, the place and the remedy."""
        value = files.read(FORMAT, path)
        assert isinstance(value, cls)
        return value

    @classmethod
    def loads(cls, data: str | bytes, name: str = "<timeline>") -> Timeline:
        """From the text of a file; `name` is what errors call it."""
        value = files.loads(FORMAT, data, name)
        assert isinstance(value, cls)
        return value

    def dumps(self) -> str:
        """The text of a file, one entry per line. FileFormatError if it could not be read back."""
        return files.dumps(FORMAT, self)

    def write(self, path: str | os.PathLike[str]) -> None:
        """To a file, whole or not at all; packed if the name ends in `.gz`."""
        files.write(FORMAT, self, path)

    def validate(self) -> None:
        """FileFormatError for the first thing that a timeline file may not hold."""
        files.validate(FORMAT, self)


def _check_across_fields(timeline: Timeline) -> None:
    """What no single field can know."""
    for index, span in enumerate(timeline.spans):
        if span.start_ns > span.end_ns:
            raise Fault(f"spans[{index}].start_ns", f"is {span.start_ns}, after end_ns at {span.end_ns}")


FORMAT = Format(
    name="teraio-timeline",
    size_max_bytes=16 * 2**20,
    build=Timeline,
    parts=(
        TopLevelKey("kind", "value", check=make_one_of_check("measured", "predicted")),
        TopLevelKey(
            "spans",
            "records",
            ObjectFormat(
                Span,
                (
                    Field("track", make_safe_text_check()),
                    Field("name", make_safe_text_check(0)),
                    Field("start_ns", make_integer_check()),
                    Field("end_ns", make_integer_check()),
                    Field("bytes", make_integer_check(), 0),
                    Field("tensor", make_safe_text_check(0), ""),
                ),
            ),
            default=(),
            count_max=ENTRIES_MAX,
        ),
        TopLevelKey(
            "counters",
            "records",
            ObjectFormat(
                Counter,
                (
                    Field("tier", make_safe_text_check(chars_max=64)),
                    Field("kind", make_safe_text_check(chars_max=64)),
                    Field("at_ns", make_integer_check()),
                    Field("bytes", make_integer_check()),
                ),
            ),
            default=(),
            count_max=ENTRIES_MAX,
        ),
        TopLevelKey(
            "stalls",
            "records",
            ObjectFormat(
                Stall,
                (
                    Field("tick", make_integer_check(end=2 * TICKS_END)),
                    Field("tensor", make_safe_text_check(0)),
                    Field("ns", make_integer_check()),
                    Field("cause", make_safe_text_check(chars_max=64)),
                ),
            ),
            default=(),
            count_max=ENTRIES_MAX,
        ),
        TopLevelKey("budget_bytes", "value", check=make_integer_check(), default=0),
        TopLevelKey("step_ns", "value", check=make_integer_check(), default=0),
        TopLevelKey("overrun_bytes", "value", check=make_integer_check(), default=0),
    ),
    law=_check_across_fields,
)
