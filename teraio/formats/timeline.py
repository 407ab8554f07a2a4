"""A timeline: what happened, or what is predicted. One type for both, so that the two can be laid side by
side.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from teraio.formats import files
from teraio.formats.fields import TICKS_END, Fault, Field, Format, Part, Record, integer, one_of, text

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


def _law(timeline: Timeline) -> None:
    """What no single field can know."""
    for index, span in enumerate(timeline.spans):
        if span.start_ns > span.end_ns:
            raise Fault(f"spans[{index}].start_ns", f"is {span.start_ns}, after end_ns at {span.end_ns}")


FORMAT = Format(
    name="teraio-timeline",
    size_max_bytes=16 * 2**20,
    build=Timeline,
    parts=(
        Part("kind", "value", check=one_of("measured", "predicted")),
        Part(
            "spans",
            "records",
            Record(
                Span,
                (
                    Field("track", text()),
                    Field("name", text(0)),
                    Field("start_ns", integer()),
                    Field("end_ns", integer()),
                    Field("bytes", integer(), 0),
                    Field("tensor", text(0), ""),
                ),
            ),
            default=(),
            count_max=ENTRIES_MAX,
        ),
        Part(
            "counters",
            "records",
            Record(
                Counter,
                (
                    Field("tier", text(chars_max=64)),
                    Field("kind", text(chars_max=64)),
                    Field("at_ns", integer()),
                    Field("bytes", integer()),
                ),
            ),
            default=(),
            count_max=ENTRIES_MAX,
        ),
        Part(
            "stalls",
            "records",
            Record(
                Stall,
                (
                    Field("tick", integer(end=2 * TICKS_END)),
                    Field("tensor", text(0)),
                    Field("ns", integer()),
                    Field("cause", text(chars_max=64)),
                ),
            ),
            default=(),
            count_max=ENTRIES_MAX,
        ),
        Part("budget_bytes", "value", check=integer(), default=0),
        Part("step_ns", "value", check=integer(), default=0),
        Part("overrun_bytes", "value", check=integer(), default=0),
    ),
    law=_law,
)
