"""Tests of units: texts become exact integers, and a printed size never rounds to less memory than needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teraio.units import LIMIT, fmt_bytes, fmt_ns, fmt_rate, parse_bytes, parse_ns, parse_rate, printable_line


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("20GiB", 20 * 2**30),
        ("20 GiB", 20 * 2**30),
        (" 20gib ", 20 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("1.1GiB", 1_181_116_006),  # rounded down from 1,181,116,006.4 bytes
        ("0.1KB", 100),
        ("123", 123),
        ("123B", 123),
        (123, 123),
        ("0", 0),
        ("2TB", 2 * 10**12),
        ("9007199254740991", LIMIT - 1),
    ],
)
def test_a_size_is_parsed_to_bytes(text: str | int, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("20G", "unknown unit 'G'; units are B, KB"),
        ("", "is not a size such as 20GiB"),
        ("GiB", "is not a size such as 20GiB"),
        ("-1", "'-1' is not a size"),
        ("1e9", "'1e9' is not a size"),
        ("1_000", "'1_000' is not a size"),
        ("١٢GiB", "is not a size"),
        ("0x10", "is not a size"),
        ("nan", "is not a size"),
        ("8PiB", "is out of range; it must lie in [0, 2**53)"),
        ("9" * 5000, "is not a size"),
        (-1, "out of range"),
        (2**53, "out of range"),
        (True, "'True' is not a size"),
        (1.5, "'1.5' is not a size"),
        (None, "'None' is not a size"),
        ("\x1b[2J", r"'\x1b[2J' is not a size"),
    ],
)
def test_a_malformed_size_is_refused_by_name(text: object, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_bytes(text)  # type: ignore[arg-type]
    assert message in str(error.value) and str(error.value).isprintable() and len(str(error.value)) < 250


def test_durations_and_rates_are_parsed() -> None:
    assert parse_ns("30s") == parse_ns(30) == parse_ns("30") == 30 * 10**9
    assert parse_ns("1.5 ms") == 1_500_000
    assert parse_ns("2min") == 120 * 10**9
    assert parse_ns("7µs") == parse_ns("7μs") == parse_ns("7us") == 7000
    assert parse_rate("20GB/s") == parse_rate("20 GB / s") == parse_rate(20 * 10**9) == 20 * 10**9
    for parse, text in ((parse_ns, "3 weeks"), (parse_ns, "1m"), (parse_rate, "5GB/h"), (parse_rate, "5/")):
        with pytest.raises(ValueError, match=r"unknown unit|is not a"):
            parse(text)


def test_sizes_durations_and_rates_are_printed_with_units() -> None:
    assert fmt_bytes(0) == "0 B"
    assert fmt_bytes(1023) == "1023 B"
    assert fmt_bytes(1024) == "1 KiB"
    assert fmt_bytes(20 * 2**30) == "20 GiB"
    assert fmt_bytes(24_803_086_336) == "23.1 GiB"
    assert fmt_bytes(24_803_086_336, up=True) == "23.1 GiB"
    assert fmt_bytes(24_813_000_000, up=True) == "23.2 GiB"
    assert fmt_bytes(-1536) == "-1.5 KiB"
    assert fmt_ns(812) == "812 ns"
    assert fmt_ns(812_345) == "812 µs"
    assert fmt_ns(1_234_567_890) == "1.23 s"
    assert fmt_rate(6_200_000_000) == "6.2 GB/s"


@given(st.integers(0, LIMIT - 1))
def test_rounding_up_never_gives_too_few_bytes(size_bytes: int) -> None:
    up = fmt_bytes(size_bytes, up=True)
    if not up.startswith(("8 PiB", "8.")):  # sizes above 7.9 PiB are rounded up only to the limit for numbers
        assert parse_bytes(up) >= size_bytes
    assert parse_bytes("7.9 PiB" if up == "8 PiB" else up) >= size_bytes * 0.98


@given(st.text(max_size=200))
def test_any_text_becomes_one_printable_line(text: str) -> None:
    line = printable_line(text, 20)
    assert line.isprintable() and len(line) <= 20 * 10 + 3
