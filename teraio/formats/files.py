"""File input and output: profiles, machines, plans and timelines, read strictly and written atomically.

The reader accepts a regular file of UTF-8 text, plain or gzip. It detects gzip by the first bytes of the
file. It refuses text that is longer than the format allows. It reads and unpacks the file in pieces. At the
first fault it raises a one-line `FileFormatError`, which names the file, the place and the remedy. Names in
files are only compared. They are never used as paths or commands.

If a file can hold more than `SCAN_BYTES` of text, the reader makes two passes. The first pass checks only the
structure. So a large file that is truncated or damaged costs no more memory than one window of text.

Limits: the reader reads all text before a fault. The pass over the structure reads about 100 MiB of text per
second. The pass that makes entries reads 10 to 20 MiB per second. The worst plan, machine or timeline takes
about a second and less than 64 MiB. A profile can cost more memory if its structure is valid but one value is
faulty. Then the entries before the faulty entry take up to 10 times the memory of their text. Two things
limit this memory: (1) the limit on the file's size, and (2) the limits on the numbers of kernels, tensors and
uses.

The writer makes a temporary file in the target's folder, then renames it. Equal values always give equal
bytes.
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
from typing import Any, ClassVar, Self, TypeVar

from teraio.errors import FileFormatError
from teraio.formats import fields, json_text
from teraio.formats.fields import Fault, Format
from teraio.units import fmt_bytes, printable_line

PIECE_BYTES = 64 * 2**10
# The most text that is read in one pass. A faulty file of this size takes little memory, because entries take
# 3 bytes of memory per byte of text.
SCAN_BYTES = 16 * 2**20
TAIL_BYTES = 2**20
MESSAGE_CHARS_MAX = 600
_GZIP = b"\x1f\x8b"
_HEADER = {
    "format": re.compile(r'"format"\s{0,9}:\s{0,9}"([a-z-]{1,40})"'),
    "version": re.compile(r'"version"\s{0,9}:\s{0,9}([0-9]{1,9})(?![0-9.eE])'),
}
T = TypeVar("T")


class FileContent:
    """The base class of a dataclass that is the content of one file. `file_format` describes the file.

    If a method fails, it raises a FileFormatError, which names the file, the place and the reason.
    """

    __slots__ = ()
    file_format: ClassVar[Format]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file, plain or gzip."""
        name = os.fsdecode(path)
        value: Self = _call_converting_faults(name, lambda: _read(cls.file_format, name))
        return value

    @classmethod
    def loads(cls, data: str | bytes, name: str | None = None) -> Self:
        """Parse the text or the bytes of a file. The bytes may be plain or gzip. Errors name the file
        `name`.
        """
        name = f"<{cls.__name__.lower()}>" if name is None else name
        value: Self = _call_converting_faults(name, lambda: _loads(cls.file_format, data))
        return value

    def dumps(self) -> str:
        """Return the text of a file, with one entry per line. Refuse a value that could not be read again."""
        form = self.file_format
        return _call_converting_faults(f"<{form.name}>", lambda: _dumps(form, self))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a file atomically. Compress it if its name ends in `.gz`."""
        name = os.fsdecode(path)
        _call_converting_faults(name, lambda: _write(self.file_format, self, name))

    def validate(self) -> None:
        """Raise an error if the value breaks a rule of its file format."""
        form = self.file_format
        _call_converting_faults(f"<{form.name}>", lambda: fields.validate(form, self))


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write bytes to a file atomically: a reader finds the old file or the whole new file."""
    name = os.fsdecode(path)
    _call_converting_faults(name, lambda: _replace_file_atomically(name, data))


def _call_converting_faults(name: str, act: Callable[[], T]) -> T:
    """Run `act`. Convert a Fault or an OSError into a FileFormatError.

    The message is one line of limited length, without control characters.
    """
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
    # Check that this is a regular file before opening it. Opening a FIFO wakes its writer, and opening a
    # device may have other effects.
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
    """Refuse an empty file, a truncated file and a gzip file that is too large, by their first and last
    bytes.
    """
    if not head:
        raise Fault("", f"is empty; expected a {form.name} file")
    if head[:2] == _GZIP:
        # The last 4 bytes of a gzip file claim the unpacked size, modulo 2**32. The claim can be wrong, so
        # `_unpack_bounded` counts the real size.
        unpacked = int.from_bytes(tail[-4:], "little")
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
    """Parse a file of `size` bytes, plain or gzip. `pieces` begins a new pass over the bytes each time it is
    called.
    """
    value = None
    # The text of a gzip file has at most 1032 times the file's size.
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
    """Return a fault if `format` or `version` in the file is wrong, else None.

    A file of another kind has unknown keys. Its keys are sorted, so an unknown key may come before `format`.
    The parser would then report this key instead of the real problem.
    """
    for key, pattern in _HEADER.items():
        found = pattern.search(head) or pattern.search(tail)
        got = found[1] if found else None
        if got and (what := json_text.header_complaint(form, key, got if key == "format" else int(got))):
            return Fault(key, what)
    return None


def _unpack_bounded(form: Format, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes in small pieces, unpacked if they are gzip. Refuse more bytes than the format
    allows.
    """
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
    """Decode UTF-8 strictly. Refuse a byte order mark."""
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
        # The header that zlib writes has no time and no file name. Equal values therefore give equal bytes.
        packer = zlib.compressobj(6, zlib.DEFLATED, 31)
        data = packer.compress(data) + packer.flush()
    _replace_file_atomically(path, data)


def _replace_file_atomically(path: str, data: bytes) -> None:
    target = os.path.realpath(path)  # if `path` is a symbolic link, replace the file to which it points
    mode = None
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(target)
        _refuse_non_regular_file(status)  # a rename would replace a device such as /dev/stdout
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
