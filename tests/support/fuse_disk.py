"""A file system that fails on command: a server of FUSE's own protocol, in Python.

    python tests/support/fuse_disk.py MOUNTED --backing FOLDER [--spoil write EIO 7] [--spoil read flip 9]

The server keeps the bytes of its files in nameless files of the folder `--backing`. `--spoil write EIO 7`
spoils every 7th write with the error EIO. Instead of an error, `--spoil` accepts one of three faults. `short`
reads or writes only half. `flip` changes a bit of the read bytes. `late` delays the operation by 20 ms.

The script needs root. It prints `ready` when the file system is mounted, and ends when the file system is
unmounted. The server handles one request at a time.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import stat
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, NamedTuple

LIBC = ctypes.CDLL(None, use_errno=True)
MOST_BYTES = 2**20  # largest size in bytes of one request
BLOCK = 4096
IN, OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
# The format of a request to change a file's attributes. The first field is the mask; mode, uid and gid are
# near the end.
SETATTR = struct.Struct("<IIQQQQQQIIIIIIII")
MODE, SIZE = 1, 8  # bits of SETATTR's mask
FORGET, FORGET_MANY, INTERRUPT = 2, 42, 36  # requests that get no answer
LATE_S = 0.02


class Refused(OSError):
    """An error of a request. The server answers with the error's number."""


class Spoiled(NamedTuple):
    op: str
    how: str
    every: int


@dataclass
class Node:
    number: int
    mode: int
    names: dict[bytes, Node] = field(default_factory=dict)
    data: IO[bytes] | None = None
    links: int = 1

    @property
    def fd(self) -> int:
        if self.data is None:
            raise Refused(errno.EISDIR, "a directory has no bytes")
        return self.data.fileno()

    def attributes(self) -> bytes:
        about = os.fstat(self.fd) if self.data is not None else None
        size, blocks = (about.st_size, about.st_blocks) if about else (0, 0)
        numbers = (self.number, size, blocks, 0, 0, 0, 0, 0, 0, self.mode, self.links, 0, 0, 0, BLOCK, 0)
        return struct.pack("<6Q10I", *numbers)


def text(body: bytes) -> bytes:
    return body.partition(b"\0")[0]


class Disk:
    """A server of requests. Each method answers one kind of request, and gets the request's node and body."""

    def __init__(self, backing: str, spoiled: list[Spoiled]) -> None:
        self.backing, self.spoiled = backing, spoiled
        root = Node(1, stat.S_IFDIR | 0o755)
        self.nodes = {0: root, 1: root}  # nodes by number; number 0 is in requests without a node
        self.done: Counter[str] = Counter()
        self.answers: dict[int, Callable[[Node, bytes], bytes]] = {
            1: self.look_up, 3: self.get_attributes, 4: self.set_attributes, 9: self.make_directory,
            10: self.unlink, 11: self.unlink, 14: self.open, 15: self.read, 16: self.write, 17: self.room,
            18: self.nothing, 20: self.nothing, 25: self.nothing, 26: self.begin, 27: self.open,
            28: self.list, 29: self.nothing, 35: self.create, 38: self.nothing, 43: self.allocate,
            51: self.create_nameless,
        }  # fmt: skip

    def answer(self, request: bytes) -> bytes | None:
        _, op, unique, number, *_ = IN.unpack_from(request)
        if op in (FORGET, FORGET_MANY, INTERRUPT):
            return None
        try:
            if op not in self.answers:
                raise Refused(errno.ENOSYS, "unknown request")
            body, error = self.answers[op](self.nodes[number], request[IN.size :]), 0
        except OSError as refused:
            body, error = b"", -(refused.errno or errno.EIO)
        return OUT.pack(OUT.size + len(body), error, unique) + body

    def spoils(self, op: str) -> str:
        """Count this operation, and return the fault that spoils it, or an empty string if none does. If the
        operation must fail, raise the error.
        """
        self.done[op] += 1
        hows = [each.how for each in self.spoiled if each.op == op and self.done[op] % each.every == 0]
        if "late" in hows:
            time.sleep(LATE_S)
        for how in hows:
            if number := getattr(errno, how, 0):
                raise Refused(number, f"spoiled: {how}")
        return hows[0] if hows else ""

    def begin(self, _: Node, body: bytes) -> bytes:
        _, minor, readahead, flags = struct.unpack_from("<4I", body)
        wanted = flags & (1 << 5 | 1 << 22)  # flags for large writes and for a page count of large requests
        return struct.pack("<4I2H2I2HI28x", 7, min(minor, 38), readahead, wanted, 16, 12, MOST_BYTES, 1,
                           MOST_BYTES // BLOCK, 0, 0)  # fmt: skip

    def entry(self, node: Node) -> bytes:
        return struct.pack("<4Q2I", node.number, 0, 0, 0, 0, 0) + node.attributes()

    def make(self, parent: Node | None, name: bytes, mode: int) -> Node:
        node = Node(max(self.nodes) + 1, mode, links=int(parent is not None))
        if stat.S_ISREG(mode):
            node.data = tempfile.TemporaryFile(dir=self.backing)  # noqa: SIM115  open as long as the node
        self.nodes[node.number] = node
        if parent is not None:
            if name in parent.names:
                raise Refused(errno.EEXIST, "the name exists")
            parent.names[name] = node
        return node

    def look_up(self, parent: Node, body: bytes) -> bytes:
        if (node := parent.names.get(text(body))) is None:
            raise Refused(errno.ENOENT, "no such name")
        return self.entry(node)

    def get_attributes(self, node: Node, _: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + node.attributes()

    def set_attributes(self, node: Node, body: bytes) -> bytes:
        what, _, _, size, *more = SETATTR.unpack_from(body)
        if what & MODE:
            node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(more[7])
        if what & SIZE:
            os.ftruncate(node.fd, size)
        return self.get_attributes(node, b"")

    def make_directory(self, parent: Node, body: bytes) -> bytes:
        (mode,) = struct.unpack_from("<I", body)
        return self.entry(self.make(parent, text(body[8:]), stat.S_IFDIR | mode))

    def unlink(self, parent: Node, body: bytes) -> bytes:
        if (node := parent.names.get(text(body))) is None:
            raise Refused(errno.ENOENT, "no such name")
        if node.names:
            raise Refused(errno.ENOTEMPTY, "the directory is not empty")
        del parent.names[text(body)]
        node.links = 0
        return b""

    def open(self, _: Node, __: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0)

    def create(self, parent: Node, body: bytes) -> bytes:
        _, mode = struct.unpack_from("<2I", body)
        return self.entry(self.make(parent, text(body[16:]), stat.S_IFREG | mode)) + self.open(parent, b"")

    def create_nameless(self, parent: Node, body: bytes) -> bytes:
        _, mode = struct.unpack_from("<2I", body)
        return self.entry(self.make(None, b"", stat.S_IFREG | mode)) + self.open(parent, b"")

    def read(self, node: Node, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        how = self.spoils("read")
        found = bytearray(os.pread(node.fd, size // 2 if how == "short" else size, offset))
        if how == "flip" and found:
            found[len(found) // 2] ^= 1
        return bytes(found)

    def write(self, node: Node, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        data = body[40 : 40 + (size // 2 if self.spoils("write") == "short" else size)]
        return struct.pack("<II", os.pwrite(node.fd, data, offset), 0)

    def allocate(self, node: Node, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<3Q", body)
        os.posix_fallocate(node.fd, offset, size)
        return b""

    def room(self, _: Node, __: bytes) -> bytes:
        about = os.statvfs(self.backing)
        blocks = [part * about.f_frsize // BLOCK for part in (about.f_blocks, about.f_bfree, about.f_bavail)]
        return struct.pack("<5Q4I24x", *blocks, 10**6, 10**6, BLOCK, 255, BLOCK, 0)

    def list(self, node: Node, body: bytes) -> bytes:
        _, after = struct.unpack_from("<QQ", body)
        found = b""
        for place, (name, each) in enumerate(list(node.names.items())[after:], after + 1):
            entry = struct.pack("<QQII", each.number, place, len(name), each.mode >> 12) + name
            found += entry + bytes(-len(entry) % 8)
        return found

    def nothing(self, _: Node, __: bytes) -> bytes:
        return b""


def serve(disk: Disk, fd: int) -> None:
    while True:
        try:
            request = os.read(fd, MOST_BYTES + BLOCK)
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno == errno.ENODEV:  # the file system is unmounted
                return
            if error.errno == errno.ENOENT:  # the process that made the request has given up
                continue
            raise
        if (answer := disk.answer(request)) is not None:
            try:
                os.write(fd, answer)
            except FileNotFoundError:
                continue


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("target")
    parser.add_argument("--backing", required=True)
    parser.add_argument("--spoil", nargs=3, action="append", default=[], metavar=("OP", "HOW", "EVERY"))
    args = parser.parse_args()
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    how = f"fd={fd},rootmode=40755,user_id=0,group_id=0"
    if LIBC.mount(b"teraio-test", args.target.encode(), b"fuse", 0, how.encode()) != 0:
        raise SystemExit(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    print("ready", flush=True)
    serve(Disk(args.backing, [Spoiled(op, how, int(every)) for op, how, every in args.spoil]), fd)


if __name__ == "__main__":
    main()
