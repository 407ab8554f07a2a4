"""A timeline: the kernels, transfers, memory and waits of one step, measured or predicted.

A measured and a predicted timeline have the same type, so that a program can compare them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

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
from teraio.formats.files import FileContent
from teraio.formats.notebook_view import ShownInNotebooks

ENTRIES_MAX = 2**17  # most spans, most counters, and most stalls; 16 MiB of text hold about as many


@dataclass(frozen=True, slots=True)
class Span:
    """A period on a track: a kernel on the track `compute`, or a transfer on the track of its lane, such as
    `evict:ssd`.
    """

    track: str
    name: str
    start_ns: int
    end_ns: int
    bytes: int = 0
    tensor: str = ""


@dataclass(frozen=True, slots=True)
class Counter:
    """The bytes of one kind of memory in one tier. They are valid from `at_ns` until the next Counter of this
    kind and tier.
    """

    tier: str
    kind: str
    at_ns: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Stall:
    """A wait of compute for a transfer. `cause` is `late read`, `link busy` or `miss`."""

    tick: int
    tensor: str
    ns: int
    cause: str


@dataclass(frozen=True, slots=True)
class Timeline(ShownInNotebooks, FileContent):
    """The timeline of one step. If `budget_bytes` or `step_ns` is unknown, it is 0.

    `overrun_bytes` is the memory beyond the budget that user code or kernels of libraries allocated. The
    counters do not include it.
    """

    bundle_function: ClassVar[str] = "bundle_of_timeline"
    kind: Literal["measured", "predicted"]
    spans: tuple[Span, ...] = ()
    counters: tuple[Counter, ...] = ()
    stalls: tuple[Stall, ...] = ()
    budget_bytes: int = 0
    step_ns: int = 0
    overrun_bytes: int = 0


def _check_across_fields(timeline: Timeline) -> None:
    """Refuse a span (a kernel or transfer) that ends before it starts."""
    for index, span in enumerate(timeline.spans):
        if span.start_ns > span.end_ns:
            raise Fault(f"spans[{index}].start_ns", f"is {span.start_ns}, after end_ns at {span.end_ns}")


Timeline.file_format = Format(
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
