"""Bytes, durations and rates: text to exact integers, and integers to text.

Sizes are whole bytes, durations are whole nanoseconds, and rates are whole bytes per second. A fraction such
as `1.5 GB` is computed with integers and rounded down. `GB` is 10**9 bytes, and `GiB` is 2**30 bytes. `G`
alone is refused, because some tools mean 10**9 and others 2**30.
"""

from __future__ import annotations

import re

# Numbers in files and options are smaller. JSON readers that use doubles can represent all integers below
# this limit exactly.
LIMIT = 2**53

_BYTES = {"B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGTP", start=1)
}
_NANOSECONDS = {
    "ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9,
}  # fmt: skip
_BINARY = (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_PER_SECOND = (("TB/s", 10**12), ("GB/s", 10**9), ("MB/s", 10**6), ("kB/s", 10**3))
_NUMBER = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,18}))?\s*([A-Za-zµμ]{0,5})", re.ASCII)

SIZES = "a size such as 20GiB, 1.5 GB or a number of bytes"
DURATIONS = "a duration such as 30s, 1.5 ms, 2min or a number of seconds"
RATES = "a rate such as 20GB/s, 6.5 GiB/s or a number of bytes per second"


def printable_line(value: object, limit: int = 60) -> str:
    """Return any value as one line of at most about `limit` characters. Replace unprintable characters by
    escape sequences.
    """
    text = value if isinstance(value, str) else repr(value)
    cut = text[: limit + 1]
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut[:limit])
    return line + ("..." if len(cut) > limit else "")


def parse_bytes(value: str | int) -> int:
    """Parse `"20GiB"`, `"1.5 GB"`, `"123"` or `123` to bytes.

    For any other text, raise ValueError with the accepted forms.
    """
    return _parse_number_with_unit(value, _BYTES, plain=1, forms=SIZES)


def parse_ns(value: str | int) -> int:
    """Parse `"30s"`, `"1.5 ms"` or `30` (seconds) to nanoseconds. Raise ValueError as `parse_bytes` does."""
    return _parse_number_with_unit(value, _NANOSECONDS, plain=10**9, forms=DURATIONS)


def parse_rate(value: str | int) -> int:
    """Parse `"20GB/s"` or `20000000000` to bytes per second. Raise ValueError as `parse_bytes` does."""
    if isinstance(value, str):
        size, slash, second = value.strip().partition("/")
        if slash and second.strip() != "s":
            raise ValueError(f"'{printable_line(value)}' is not {RATES}")
        value = size
    return _parse_number_with_unit(value, _BYTES, plain=1, forms=RATES)


def _parse_number_with_unit(value: str | int, units: dict[str, int], *, plain: int, forms: str) -> int:
    whole, fraction, unit = 0, "", ""
    if isinstance(value, int) and not isinstance(value, bool):
        whole = value
    elif isinstance(value, str) and (match := _NUMBER.fullmatch(value.strip())):
        whole, fraction, unit = int(match[1]), match[2] or "", match[3].replace("μ", "µ")
    else:
        raise ValueError(f"'{printable_line(value)}' is not {forms}")
    scale = plain if not unit else units.get(unit) or _scale_of_unit_ignoring_case(unit, units)
    if not scale:
        raise ValueError(
            f"'{printable_line(value)}' has an unknown unit '{unit}'; units are {', '.join(units)}"
        )
    number = whole * scale + int(fraction or "0") * scale // 10 ** len(fraction)
    if not 0 <= number < LIMIT:
        raise ValueError(f"'{printable_line(value)}' is out of range; it must lie in [0, 2**53)")
    return number


def _scale_of_unit_ignoring_case(unit: str, units: dict[str, int]) -> int:
    """Return the scale of a unit, such as 2**30 for `gib`. Ignore upper and lower case. Return 0 for an
    unknown unit.
    """
    return next((scale for name, scale in units.items() if name.lower() == unit.lower()), 0)


def fmt_bytes(size_bytes: int, *, up: bool = False) -> str:
    """Format a size as `23.1 GiB`.

    If `up`, round up. Messages that tell a user how much memory to give need this.
    """
    return _fmt_in_largest_unit(size_bytes, _BINARY, "B", up)


def fmt_count(count: int, word: str) -> str:
    """Format a count with its noun, as `1 weight` or `2 weights`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def fmt_ns(duration_ns: int) -> str:
    """Format a duration as `812 µs` or `1.23 s`."""
    return _fmt_in_largest_unit(
        duration_ns, (("s", 10**9), ("ms", 10**6), ("µs", 10**3)), "ns", False, digits=3
    )


def fmt_rate(bandwidth_bytes_per_s: int) -> str:
    """Format a rate as `6.2 GB/s`. The units are decimal, as in data sheets."""
    return _fmt_in_largest_unit(bandwidth_bytes_per_s, _PER_SECOND, "B/s", False)


def _fmt_in_largest_unit(
    number: int, units: tuple[tuple[str, int], ...], base: str, up: bool, digits: int = 0
) -> str:
    """Format the number in its largest unit, with one decimal, or with `digits` significant digits.

    With `up`, round up, otherwise to the nearest. The computation uses integers, so the rounding is exact.
    """
    sign, number = ("-", -number) if number < 0 else ("", number)
    for unit, scale in units:
        if number >= scale:
            decimals = max(0, digits - len(str(number // scale))) if digits else 1
            tens = 10**decimals
            scaled = -(-number * tens // scale) if up else (number * tens + scale // 2) // scale
            whole, rest = divmod(scaled, tens)
            point = f".{rest:0{decimals}d}".rstrip("0").rstrip(".") if decimals else ""
            return f"{sign}{whole}{point} {unit}"
    return f"{sign}{number} {base}"
