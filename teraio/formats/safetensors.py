"""A strict reader of safetensors headers, and of the index file that lists several safetensors files.

A header gives the location of each tensor's bytes:

    8 bytes: N
    N bytes of JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    the data

The reader takes the header in pieces and parses one entry at a time. So a hostile header costs only the
memory of its valid entries. The tensors must cover the data exactly. The reader refuses holes, overlaps, and
bytes after the last tensor.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

from teraio.errors import FileFormatError
from teraio.formats.fields import Fault
from teraio.formats.json_text import RECORD, STRING, Cursor
from teraio.units import fmt_bytes, printable_line

HEADER_BYTES_MAX = 16 * 2**20  # enough for about 150,000 tensors; the safetensors format allows 100 MB
PIECE_BYTES = 64 * 2**10
DIMENSIONS_MAX = 64
METADATA = "__metadata__"

# Bytes of one number, for each dtype that torch has.
SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file. Its bytes are at the file offsets from `begin` to `end` - 1."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(descriptor: int, path: str) -> dict[str, TensorEntry]:
    """Return the tensors of an open safetensors file, by name."""
    return _call_converting_faults(path, lambda: _parse_header(descriptor))


def read_index(path: str) -> dict[str, str]:
    """Return, for each tensor, the name of the file that holds it. All files are in the folder of the
    index.
    """
    return _call_converting_faults(path, lambda: _parse_index(path))


def _call_converting_faults(path: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except Fault as fault:
        where = f" at {fault.path}" if fault.path else ""
        raise FileFormatError(f"{path}{where}: {fault.what}. Download or write the file again") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path} cannot be read: {error}") from None


def _parse_header(descriptor: int) -> dict[str, TensorEntry]:
    file_bytes = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if file_bytes < 8 or length > file_bytes - 8:
        raise Fault("", f"the length field gives a header of {length} bytes, the file has {file_bytes}")
    if length > HEADER_BYTES_MAX:
        raise Fault("", f"the header has {fmt_bytes(length)}; at most {fmt_bytes(HEADER_BYTES_MAX)} are read")
    if os.pread(descriptor, 1, 8) != b"{":
        raise Fault("", "the header does not begin with '{'")
    cursor = Cursor(_read_text_pieces(descriptor, 8, length))
    entries: dict[str, TensorEntry] = {}
    seen: set[str] = set()
    for name in _parse_keys_of_object(cursor, ""):
        if name in seen:
            raise Fault(printable_line(name), "the name appears twice")
        seen.add(name)
        record = _parse_flat_object(cursor, name)
        if name != METADATA:
            entries[name] = _validated_entry(name, record, 8 + length, file_bytes)
    _refuse_trailing_text(cursor)
    _refuse_holes_and_overlaps(entries, 8 + length, file_bytes)
    return entries


def _read_text_pieces(descriptor: int, at: int, length: int) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    end = at + length
    while at < end:
        piece = os.pread(descriptor, min(PIECE_BYTES, end - at), at)
        if not piece:
            raise Fault("", "the file ends in its header")
        at += len(piece)
        yield decoder.decode(piece, final=at == end)


def _parse_keys_of_object(cursor: Cursor, path: str) -> Iterator[str]:
    """Yield the keys of the object at the cursor. Before the next key, the caller must consume the value of
    the last key.
    """
    cursor.consume_mark("{", path)
    if cursor.peek_after_whitespace() == "}":
        cursor.consume_mark("}", path)
        return
    while True:
        name: str = json.loads(cursor.consume_match(STRING, path, "a name"))
        cursor.consume_mark(":", path)
        yield name
        if cursor.consume_mark(",}", path) == "}":
            return


def _parse_flat_object(cursor: Cursor, name: str) -> dict[str, Any]:
    def dict_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise Fault(printable_line(name), "a key appears twice")
        return dict(pairs)

    found: dict[str, Any] = json.loads(
        cursor.consume_match(RECORD, printable_line(name), "an object"), object_pairs_hook=dict_of_unique_keys
    )
    return found


def _validated_entry(name: str, record: dict[str, Any], base: int, file_bytes: int) -> TensorEntry:
    where = printable_line(name)
    if record.keys() != {"dtype", "shape", "data_offsets"}:
        raise Fault(
            where, f"has the keys {printable_line(sorted(record))}; expected dtype, shape and data_offsets"
        )
    dtype, shape, offsets = record["dtype"], record["shape"], record["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise Fault(where, f"dtype is {printable_line(dtype)}; torch has {', '.join(SIZES)}")
    if not isinstance(shape, list) or len(shape) > DIMENSIONS_MAX:
        raise Fault(where, f"shape is not a list of at most {DIMENSIONS_MAX} numbers")
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise Fault(where, "data_offsets are not two numbers")
    begin, end = base + offsets[0], base + offsets[1]
    if not base <= begin <= end <= file_bytes:
        raise Fault(where, f"data_offsets are {offsets}; the file has {file_bytes - base} bytes of data")
    if end - begin != prod(shape) * SIZES[dtype]:
        raise Fault(where, f"{end - begin} bytes do not match {dtype} of shape {printable_line(shape)}")
    return TensorEntry(dtype, tuple(shape), begin, end)


def _refuse_trailing_text(cursor: Cursor) -> None:
    if cursor.peek_after_whitespace():
        raise Fault("", "text follows the end of the header")


def _refuse_holes_and_overlaps(entries: dict[str, TensorEntry], base: int, file_bytes: int) -> None:
    end = base
    for name, entry in sorted(entries.items(), key=lambda pair: (pair[1].begin, pair[1].end)):
        if entry.begin != end:
            what = "overlaps the one before it" if entry.begin < end else "begins behind a hole"
            raise Fault(printable_line(name), what)
        end = entry.end
    if end != file_bytes:
        raise Fault("", f"the last {file_bytes - end} bytes belong to no tensor")


def _parse_index(path: str) -> dict[str, str]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes > HEADER_BYTES_MAX:
            limit = fmt_bytes(HEADER_BYTES_MAX)
            raise Fault("", f"the index has {fmt_bytes(size_bytes)}; at most {limit} are read")
        cursor = Cursor(_read_text_pieces(descriptor, 0, size_bytes))
        files: dict[str, str] | None = None
        for key in _parse_keys_of_object(cursor, ""):
            if key == "weight_map" and files is None:
                files = dict(_parse_weight_map(cursor))
            elif key == "metadata":
                _parse_flat_object(cursor, key)
            else:
                raise Fault(printable_line(key), "expected metadata and weight_map, once each")
        _refuse_trailing_text(cursor)
    finally:
        os.close(descriptor)
    if files is None:
        raise Fault("", "the index has no weight_map")
    return files


def _parse_weight_map(cursor: Cursor) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for name in _parse_keys_of_object(cursor, "weight_map"):
        file = json.loads(cursor.consume_match(STRING, printable_line(name), "the name of a file"))
        if name in seen:
            raise Fault(printable_line(name), "the name appears twice")
        if os.path.basename(file) != file or not file.endswith(".safetensors") or "\0" in file:
            raise Fault(
                printable_line(name),
                f"{printable_line(file)} is not the name of a safetensors file beside the index",
            )
        seen.add(name)
        yield name, file
