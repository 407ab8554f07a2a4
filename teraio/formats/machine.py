"""A machine: tiers with capacities, directed links with bandwidths, and what links have in common."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import NamedTuple

from teraio.formats import files
from teraio.formats.fields import Fault, Field, Format, Part, Record, integer, nearest, text, unique
from teraio.units import shown

ENTRIES_MAX = 1024  # tiers, links, and shared bandwidths


@dataclass(frozen=True, slots=True)
class Tier:
    name: str  # "device", "host", "ssd", "ssd0", ...
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Link:
    source: str  # "from" in the file
    target: str  # "to" in the file
    bandwidth_bytes_per_s: int
    latency_ns: int = 0
    shares: str | None = None  # the name of a bandwidth that several links have in common


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    shared: tuple[tuple[str, int], ...] = field(default=())  # (name, bandwidth_bytes_per_s)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Machine:
        """From a file, plain or gzip; FileFormatError names the file, the place and the remedy."""
        value = files.read(FORMAT, path)
        assert isinstance(value, cls)
        return value

    @classmethod
    def loads(cls, data: str | bytes, name: str = "<machine>") -> Machine:
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
        """FileFormatError for the first thing that a machine file may not hold."""
        files.validate(FORMAT, self)


class _Shared(NamedTuple):
    name: str
    bandwidth_bytes_per_s: int


def _law(machine: Machine) -> None:
    """What no single field can know: names appear once and refer to something."""
    tiers = [tier.name for tier in machine.tiers]
    unique("tiers", iter(tiers), ".name")
    unique("shared", (name for name, _ in machine.shared), ".name")
    unique("links", ((link.source, link.target) for link in machine.links))
    if "device" not in tiers:
        raise Fault("tiers", f"has no tier named device; found {', '.join(map(shown, tiers)) or 'none'}")
    shared = [name for name, _ in machine.shared]
    for index, link in enumerate(machine.links):
        refers = ("from", link.source, tiers), ("to", link.target, tiers), ("shares", link.shares, shared)
        for key, name, names in refers:
            if name is not None and name not in names:
                known = (
                    f"expected one of {', '.join(map(shown, names[:8]))}"
                    if names
                    else "no such name is known"
                )
                what = f'is "{shown(name)}"; {known}{nearest(name, names)}'
                raise Fault(f"links[{index}].{key}", what)
        if link.source == link.target:
            raise Fault(f"links[{index}].to", f'is "{shown(link.target)}", where the link starts')


FORMAT = Format(
    name="teraio-machine",
    size_max_bytes=16 * 2**20,
    build=Machine,
    parts=(
        Part("name", "value", check=text(0)),
        Part(
            "tiers",
            "table",
            Record(Tier, (Field("name", text(chars_max=64)), Field("capacity_bytes", integer()))),
            count_max=ENTRIES_MAX,
        ),
        Part(
            "links",
            "records",
            Record(
                Link,
                (
                    Field("from", text(chars_max=64), attribute="source"),
                    Field("to", text(chars_max=64), attribute="target"),
                    Field("bandwidth_bytes_per_s", integer(1)),
                    Field("latency_ns", integer(), 0),
                    Field("shares", text(chars_max=64), None),
                ),
            ),
            count_max=ENTRIES_MAX,
        ),
        Part(
            "shared",
            "table",
            Record(
                _Shared,
                (Field("name", text(chars_max=64)), Field("bandwidth_bytes_per_s", integer(1))),
                view=_Shared._make,
            ),
            default=(),
            count_max=ENTRIES_MAX,
        ),
    ),
    law=_law,
)
