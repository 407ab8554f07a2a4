"""Files in and out: profiles, machines, plans and timelines, read strictly and written whole or not at all.

Reading: a regular file, plain or gzip (told by its first bytes), of UTF-8 text, of at most the format's
number of bytes unpacked. Bytes flow through in pieces; the first fault ends it with a one-line
`FileFormatError` that names the file, the place and the remedy. A file that may hold more than `SCAN_BYTES`
is walked once for its structure before anything is made, so that a large file that was cut or damaged costs a
window of memory. Names in files are only ever matched.

Limits: a fault is found after what stands before it, at some 100 MiB of text per second when only the
structure is walked and 10 to 20 MiB when entries are made. Plans, machines and timelines hold so little that
the worst takes about a second and less than 64 MiB. A profile whose structure is sound costs the memory of
its entries up to the first that is not, up to 10 times their text: nothing bounds that but its own size and
its counts of kernels, tensors and uses.

Writing: a temporary file beside the target, then a rename; the same value always gives the same bytes.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import secrets
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from teraio.errors import FileFormatError
from teraio.formats import fields, json_text
from teraio.formats.fields import Fault, Format
from teraio.units import fmt_bytes, printable_line

PIECE_BYTES = 64 * 2**10
SCAN_BYTES = 16 * 2**20  # below it, what a file can make is bounded well enough: 3 bytes of memory per byte
TAIL_BYTES = 2**20
MESSAGE_CHARS_MAX = 600
_GZIP = b"\x1f\x8b"
_HEADER = {
    "format": re.compile(r'"format"\s{0,9}:\s{0,9}"([a-z-]{1,40})"'),
    "version": re.compile(r'"version"\s{0,9}:\s{0,9}([0-9]{1,9})(?![0-9.eE])'),
}
T = TypeVar("T")


def read(form: Format, path: str | os.PathLike[str]) -> Any:
    """A file -> the dataclass of its format."""
    name = os.fsdecode(path)
    return _call_converting_faults(name, lambda: _read(form, name))


def loads(form: Format, data: str | bytes, name: str) -> Any:
    """The text of a file, or its bytes (plain or gzip) -> the dataclass; `name` is what errors call it."""
    return _call_converting_faults(name, lambda: _loads(form, data))


def dumps(form: Format, value: Any) -> str:
    """The text of a file; FileFormatError if it could not be read back."""
    return _call_converting_faults(f"<{form.name}>", lambda: _dumps(form, value))


def validate(form: Format, value: Any) -> None:
    """FileFormatError for the first thing that a file of this format may not hold."""
    _call_converting_faults(f"<{form.name}>", lambda: fields.validate(form, value))


def write(form: Format, value: Any, path: str | os.PathLike[str]) -> None:
    """The dataclass -> a file, whole or not at all; packed if its name ends in `.gz`."""
    name = os.fsdecode(path)
    _call_converting_faults(name, lambda: _write(form, value, name))


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Anything -> a file, whole or not at all."""
    name = os.fsdecode(path)
    _call_converting_faults(name, lambda: _replace_file_atomically(name, data))


def _call_converting_faults(name: str, act: Callable[[], T]) -> T:
    """Run `act`; what it cannot take becomes one line of bounded length without control characters."""
    try:
        return act()
    except Fault as fault:
        places = [fault.path] if fault.path else []
        places += ["line {}, column {}".format(*fault.place)] if fault.place else []
        raise FileFormatError(_error_line(name, *places, fault.what)) from None
    except OSError as error:
        raise FileFormatError(_error_line(name, error.strerror or str(error))) from None


def _error_line(name: str, *parts: str) -> str:
    return printable_line(": ".join((printable_line(name, 200), *parts)), MESSAGE_CHARS_MAX)


def _read(form: Format, path: str) -> Any:
    if "\0" in path:
        raise Fault("", "the path holds a NUL character")
    # Looked at before it is opened: opening a FIFO would wake its writer, and a device may act on it.
    _refuse_non_regular_file(os.stat(path))
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        status = os.fstat(fd)
        _refuse_non_regular_file(status)
        if status.st_size > form.size_max_bytes:
            raise Fault("", _too_large_message(form, f"is {fmt_bytes(status.st_size)}"))
        ends = _read_chunk_at(fd, 0), _read_chunk_at(fd, max(0, status.st_size - json_text.HEAD_CHARS))
        _refuse_bad_head_or_tail(form, status.st_size, *ends)

        def pieces() -> Iterator[bytes]:
            os.lseek(fd, 0, os.SEEK_SET)
            while piece := os.read(fd, PIECE_BYTES):
                yield piece

        return _parse(form, pieces, size=status.st_size, tail=ends[1])
    finally:
        os.close(fd)


def _refuse_non_regular_file(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO"}.get(
            stat.S_IFMT(status.st_mode), "a device"
        )
        raise Fault("", f"is {kind}; expected a regular file")


def _read_chunk_at(fd: int, offset: int) -> bytes:
    return os.pread(fd, json_text.HEAD_CHARS, offset)


def _refuse_bad_head_or_tail(form: Format, size: int, head: bytes, tail: bytes) -> None:
    """What the two ends tell without reading the rest."""
    if not head:
        raise Fault("", f"is empty; expected a {form.name} file")
    if head[:2] == _GZIP:
        unpacked = int.from_bytes(
            tail[-4:], "little"
        )  # the gzip trailer's hint, modulo 2**32; counted again later
        if unpacked > form.size_max_bytes:
            raise Fault(
                "", _too_large_message(form, f"claims {fmt_bytes(unpacked)} unpacked, or is truncated")
            )
    elif size > TAIL_BYTES and tail.rstrip(b" \t\r\n")[-1:] != b"}":
        raise Fault("", f"does not end in }} after {size} bytes; was the file truncated?")


def _too_large_message(form: Format, what: str) -> str:
    return f"{what}; a {form.name} file holds at most {fmt_bytes(form.size_max_bytes)}"


def _loads(form: Format, data: str | bytes) -> Any:
    if isinstance(data, str):
        if len(data) > form.size_max_bytes:
            raise Fault("", _too_large_message(form, f"is {len(data)} characters"))
        text = data
        cursor = json_text.Cursor(text[at : at + PIECE_BYTES] for at in range(0, len(text), PIECE_BYTES))
        return _parse_and_check_rules(form, cursor, make=True, tail=b"")
    view = memoryview(data)

    def pieces() -> Iterator[bytes]:
        return (bytes(view[at : at + PIECE_BYTES]) for at in range(0, len(view), PIECE_BYTES))

    return _parse(form, pieces, size=len(data), tail=data[-json_text.HEAD_CHARS :])


def _parse(form: Format, pieces: Callable[[], Iterable[bytes]], *, size: int, tail: bytes) -> Any:
    """Pieces of `size` bytes in all, packed or not; `pieces` may be asked for twice."""
    value = None
    # A gzip stream unpacks to 1032 times its size at most.
    large = size * 1032 > SCAN_BYTES if _is_gzip(pieces) else size > SCAN_BYTES
    for make in (False, True) if large and form.size_max_bytes > SCAN_BYTES else (True,):
        cursor = json_text.Cursor(_decode_utf8(_unpack_bounded(form, pieces())))
        value = _parse_and_check_rules(form, cursor, make=make, tail=tail)
    return value


def _is_gzip(pieces: Callable[[], Iterable[bytes]]) -> bool:
    return next(iter(pieces()), b"")[:2] == _GZIP


def _parse_and_check_rules(form: Format, cursor: json_text.Cursor, *, make: bool, tail: bytes) -> Any:
    try:
        value = json_text.parse_document(form, cursor, make=make)
        if make:
            form.law(value)
        return value
    except Fault as fault:
        raise _wrong_header_fault(form, cursor.head, tail.decode("ascii", "replace")) or fault from None


def _wrong_header_fault(form: Format, head: str, tail: str) -> Fault | None:
    """A better reason than the first fault: this is another kind of file, or of a newer version.

    Keys are sorted, so `format` and `version` may stand after things that another kind words differently.
    """
    for key, pattern in _HEADER.items():
        found = pattern.search(head) or pattern.search(tail)
        got = found[1] if found else None
        if got and (what := json_text.header_complaint(form, key, got if key == "format" else int(got))):
            return Fault(key, what)
    return None


def _unpack_bounded(form: Format, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Bytes as they are, or out of one gzip stream; never more than the format holds, in bounded pieces."""
    total = 0
    for piece in _gunzip_pieces(iter(pieces)):
        total += len(piece)
        if total > form.size_max_bytes:
            raise Fault("", _too_large_message(form, "is larger unpacked"))
        yield piece


def _gunzip_pieces(pieces: Iterator[bytes]) -> Iterator[bytes]:
    first = next(pieces, b"")
    if first[:2] != _GZIP:
        if first:
            yield first
        yield from pieces
        return
    unpacker = zlib.decompressobj(wbits=31)
    packed = first
    try:
        while packed:
            while packed and not unpacker.eof:
                yield unpacker.decompress(packed, PIECE_BYTES)
                packed = unpacker.unconsumed_tail
            if unpacker.eof and (unpacker.unused_data or packed or next(pieces, b"")):
                raise Fault("", "something follows the end of the gzip stream; pack the file again")
            packed = b"" if unpacker.eof else next(pieces, b"")
        while more := unpacker.decompress(b"", PIECE_BYTES) if not unpacker.eof else b"":
            yield more
    except zlib.error as error:
        raise Fault("", f"is not a whole gzip file ({error}); was it truncated or damaged?") from None
    if not unpacker.eof:
        raise Fault("", "the gzip stream ends in the middle; was the file truncated?")


def _decode_utf8(pieces: Iterable[bytes]) -> Iterator[str]:
    """UTF-8, strictly, without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    offset = 0
    try:
        for piece in pieces:
            if not offset and piece.startswith(codecs.BOM_UTF8):
                raise Fault("", "starts with a byte order mark; write plain UTF-8")
            text = decoder.decode(piece)
            offset += len(piece)
            yield text
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        where = offset + error.start - len(decoder.getstate()[0])
        raise Fault("", f"is not UTF-8 at byte {max(0, where)}: {error.reason}") from None


def _dumps(form: Format, value: Any) -> str:
    fields.validate(form, value)
    text = fields.encode_file_text(form, value)
    size = len(text) if text.isascii() else len(text.encode())
    if size > form.size_max_bytes:
        raise Fault("", _too_large_message(form, f"would be {fmt_bytes(size)}"))
    return text


def _write(form: Format, value: Any, path: str) -> None:
    data = _dumps(form, value).encode()
    if path.endswith(".gz"):
        packer = zlib.compressobj(
            6, zlib.DEFLATED, 31
        )  # its header has no time and no name: the same bytes each time
        data = packer.compress(data) + packer.flush()
    _replace_file_atomically(path, data)


def _replace_file_atomically(path: str, data: bytes) -> None:
    target = os.path.realpath(path)  # through a link the user made, to the file it names
    mode = None
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(target)
        _refuse_non_regular_file(status)  # never rename over /dev/stdout
        mode = stat.S_IMODE(status.st_mode)
    folder, base = os.path.split(target)
    temporary = os.path.join(folder, f".{base[:100]}.{secrets.token_hex(6)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(fd, "wb") as file:
            if mode is not None:
                os.fchmod(fd, mode)
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
