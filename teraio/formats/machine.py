"""A machine: memory tiers with capacities, and links with bandwidths. Several links may share one bandwidth.

A link transfers bytes in one direction between two tiers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from teraio.formats.fields import (
    Fault,
    Field,
    Format,
    ObjectFormat,
    TopLevelKey,
    make_integer_check,
    make_safe_text_check,
    refuse_duplicates,
    suggest_nearest_name,
)
from teraio.formats.files import FileContent
from teraio.units import printable_line

ENTRIES_MAX = 1024  # largest number of tiers, of links, and of shared bandwidths


@dataclass(frozen=True, slots=True)
class Tier:
    name: str  # "device", "host", "ssd", "ssd0", ...
    capacity_bytes: int
    # The size of the drives of this tier, on which their rating depends. A tier may have less room.
    drive_bytes: int | None = None

    @property
    def rated_bytes(self) -> int:
        """Return the bytes from which the rating of the drives is estimated."""
        return self.drive_bytes or self.capacity_bytes


@dataclass(frozen=True, slots=True)
class Link:
    source: str  # the key in the file is "from"
    target: str  # the key in the file is "to"
    bandwidth_bytes_per_s: int
    latency_ns: int = 0
    shares: str | None = None  # the name of the bandwidth that this link shares with other links


@dataclass(frozen=True, slots=True)
class Machine(FileContent):
    name: str
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    shared: tuple[tuple[str, int], ...] = field(default=())  # (name, bandwidth_bytes_per_s)


class _SharedBandwidth(NamedTuple):
    name: str
    bandwidth_bytes_per_s: int


def _check_across_fields(machine: Machine) -> None:
    """Refuse names that appear twice, names that refer to no tier or shared bandwidth, and a machine without
    a device.
    """
    tiers = [tier.name for tier in machine.tiers]
    refuse_duplicates("tiers", iter(tiers), ".name")
    refuse_duplicates("shared", (name for name, _ in machine.shared), ".name")
    refuse_duplicates("links", ((link.source, link.target) for link in machine.links))
    if "device" not in tiers:
        raise Fault(
            "tiers", f"has no tier named device; found {', '.join(map(printable_line, tiers)) or 'none'}"
        )
    shared = [name for name, _ in machine.shared]
    for index, link in enumerate(machine.links):
        refers = ("from", link.source, tiers), ("to", link.target, tiers), ("shares", link.shares, shared)
        for key, name, names in refers:
            if name is not None and name not in names:
                known = (
                    f"expected one of {', '.join(map(printable_line, names[:8]))}"
                    if names
                    else "no such name is known"
                )
                what = f'is "{printable_line(name)}"; {known}{suggest_nearest_name(name, names)}'
                raise Fault(f"links[{index}].{key}", what)
        if link.source == link.target:
            raise Fault(f"links[{index}].to", f'is "{printable_line(link.target)}", where the link starts')


Machine.file_format = Format(
    name="teraio-machine",
    size_max_bytes=16 * 2**20,
    build=Machine,
    parts=(
        TopLevelKey("name", "value", check=make_safe_text_check(0)),
        TopLevelKey(
            "tiers",
            "table",
            ObjectFormat(
                Tier,
                (
                    Field("name", make_safe_text_check(chars_max=64)),
                    Field("capacity_bytes", make_integer_check()),
                    Field("drive_bytes", make_integer_check(), None),
                ),
            ),
            count_max=ENTRIES_MAX,
        ),
        TopLevelKey(
            "links",
            "records",
            ObjectFormat(
                Link,
                (
                    Field("from", make_safe_text_check(chars_max=64), attribute="source"),
                    Field("to", make_safe_text_check(chars_max=64), attribute="target"),
                    Field("bandwidth_bytes_per_s", make_integer_check(1)),
                    Field("latency_ns", make_integer_check(), 0),
                    Field("shares", make_safe_text_check(chars_max=64), None),
                ),
            ),
            count_max=ENTRIES_MAX,
        ),
        TopLevelKey(
            "shared",
            "table",
            ObjectFormat(
                _SharedBandwidth,
                (
                    Field("name", make_safe_text_check(chars_max=64)),
                    Field("bandwidth_bytes_per_s", make_integer_check(1)),
                ),
                view=_SharedBandwidth._make,
            ),
            default=(),
            count_max=ENTRIES_MAX,
        ),
    ),
    law=_check_across_fields,
)
