"""Tests with hostile files. The reader refuses each file fast, and takes less than 64 MiB.

The message is one line that names the place in the file.
"""

from __future__ import annotations

import gzip
import os
import resource
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import cpu_limit
import pytest
import tree

from teraio.errors import FileFormatError
from teraio.formats.json_errors import ONCE
from teraio.formats.machine import Machine
from teraio.formats.plan import Evict, Plan
from teraio.formats.profile import Profile
from teraio.formats.timeline import Timeline

sys.path.insert(0, str(tree.ROOT / "tests" / "long"))
import fuzz_files

ATTACKS = tree.ROOT / "tests" / "data" / "attacks"
KINDS: dict[str, type[fuzz_files.Data]] = {
    "plan": Plan,
    "profile": Profile,
    "machine": Machine,
    "timeline": Timeline,
}
MIB = 2**20

# The expected place and reason in the error message of each file. The test ignores the rest of the message.
MESSAGES = {
    "machine-bandwidth-0.json": "links[0].bandwidth_bytes_per_s: line 4, column 1: is 0",
    "machine-link-to-nowhere.json": 'links[0].to: is "hots"; expected one of device, host',
    "machine-shares-nothing.json": 'links[0].shares: is "pcie"; no such name is known',
    "machine-tier-twice.json": 'tiers[2].name: "host" appears already',
    "plan-1e308.json": "budget_bytes: line 2, column 16: is 1e308; expected an integer",
    "plan-2-to-the-53.json": "budget_bytes: line 2, column 16: is 9007199254740992",
    "plan-2-to-the-63.json": "budget_bytes: line 2, column 16: is a number of more than 16 digits",
    "plan-bad-utf8.json": "is not UTF-8 at byte 143",
    "plan-bom.json": "byte order mark",
    "plan-comment.json": "moves[0]: line 8, column 1: found //",
    "plan-damaged.json.gz": "is not a whole gzip file",
    "plan-deep-objects.json": "moves[0].a: line 8, column 6: is an object",
    "plan-deep.json": "moves[0]: line 8, column 1: is a list; expected an object",
    "plan-empty.json": "is empty",
    "plan-float.json": "moves[0].free: line 8, column 9: is 20.0; expected an integer",
    "plan-format-of-a-profile.json": 'format: is "teraio-profile"; expected "teraio-plan"',
    "plan-free-before-trigger.json": "moves[0].trigger: is 13, after free at 12",
    "plan-infinity.json": "budget_bytes: line 2, column 16: is -Infinity, which JSON does not have",
    "plan-key-twice-escaped.json": "moves[0].free: line 8, column 1: appears twice",
    "plan-key-twice.json": "moves[0].free: line 8, column 1: appears twice",
    "plan-leading-zero.json": "budget_bytes: line 2, column 16: is 08; integers have no leading zero",
    "plan-lone-surrogate.json": r"moves[0].tensor: line 8, column 1: holds \ud800",
    "plan-nan.json": "budget_bytes: line 2, column 16: is NaN, which JSON does not have",
    "plan-negative.json": "moves[0].free: line 8, column 9: is -1; expected an integer of at least 0",
    "plan-nul-in-name.json": r"moves[0].tensor: line 8, column 1: holds \x00",
    "plan-null.json": "moves[0].trigger: line 8, column 62: is null; leave the key out",
    "plan-overlong-utf8.json": "is not UTF-8 at byte 140",
    "plan-pickle.json": "line 1, column 1: found cos",
    "plan-right-to-left.json": r"moves[0].tensor: line 8, column 1: holds \u202e",
    "plan-single-quotes.json": "moves[0]: line 8, column 2: found 'free'; expected a string",
    "plan-terminal-escape-raw.json": r"moves[0].tensor: line 8, column 37: a string holds the control",
    "plan-terminal-escape.json": r"moves[0].tensor: line 8, column 1: holds \x1b",
    "plan-tick-2-to-the-33.json": "moves[0].free: line 8, column 1: is 8589934592",
    "plan-to-device.json": "moves[0].to: is device",
    "plan-top-key-twice.json": "budget_bytes: line 4, column 24: appears twice",
    "plan-trailing-comma.json": "moves[1]: line 9, column 1: found ]",
    "plan-true-as-integer.json": "moves[0].trigger: line 8, column 1: is true; expected an integer",
    "plan-truncated.json": "moves[0].move: line 8, column 29: the text ends here",
    "plan-truncated.json.gz": "or is truncated",
    "plan-two-members.json.gz": "something follows the end of the gzip stream",
    "plan-two-objects.json": "line 10, column 1: something follows the end",
    "plan-unknown-key.json": "moves[0].triger: line 8, column 1: is unknown; did you mean trigger?",
    "plan-utf16.json": "is not UTF-8 at byte 0",
    "plan-version-1-as-text.json": 'version: line 6, column 11: is "1"',
    "plan-version-1-with-late.json": "late: is a key of version 2; the version of this file is 1",
    "plan-version-3.json": "version: is 3; this teraio reads versions 1 to 2; a newer teraio wrote it",
    "profile-born-without-write.json": "tensors[0].born: is 0, but the tensor has no write at this tick",
    "profile-version-1-with-born.json": "version: is 1, but an entry has a key of version 2",
    "profile-kind-unknown.json": 'tensors[0].kind: line 10, column 1: is "wieght"',
    "profile-name-twice.json": 'tensors[1].name: "w" appears already at tensors[0]',
    "profile-never-written.json": "tensors[0].writes: is empty",
    "profile-sizes-overflow.json": "tensors: size_bytes adds up to 27021597764222973",
    "profile-tick-beyond-end.json": "tensors[0].reads: holds tick 1; there are 1 kernels",
    "profile-ticks-unsorted.json": "tensors[0].reads: line 12, column 1: holds 1 after 2",
    "timeline-ends-before-start.json": "spans[0].start_ns: is 2, after end_ns at 1",
}


def test_every_attack_file_has_an_expected_message() -> None:
    assert {path.name for path in ATTACKS.iterdir() if "json" in path.name} == {
        *MESSAGES,
        "plan-path-names-taken.json",
    }


@pytest.mark.parametrize("name", MESSAGES)
def test_an_attack_is_refused_in_one_line_that_names_the_place(name: str) -> None:
    kind = KINDS[name.split("-", maxsplit=1)[0]]
    with pytest.raises(FileFormatError) as error:
        kind.read(ATTACKS / name)
    line = str(error.value)
    assert f"{name}: " in line and MESSAGES[name] in line
    assert line.isprintable() and len(line) < 700


def test_names_like_paths_and_commands_are_only_names(tmp_path: Path) -> None:
    plan = Plan.read(ATTACKS / "plan-path-names-taken.json")
    assert plan.moves[0].tensor == "../../../etc/passwd"
    assert Plan.loads(plan.dumps()) == plan


PLAN_HEAD = b'{"format":"teraio-plan","version":1,"fingerprint":"","planner":"","budget_bytes":1,"moves":[\n'
DROP = b'{"move":"drop","tensor":"a%06d","to":"b","free":%d},\n'
KERNEL = b'{"call":0,"duration_ns":1,"name":"k"},\n'
PROFILE_HEAD = b'{"format":"teraio-profile","kernels":[\n'

LONG_DROPS = b'{"move":"drop","tensor":"%s","to":"b","free":1},\n' % (b"x" * 1000) * 9_000


def packed(pieces: Iterator[bytes]) -> bytes:
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    return b"".join(map(packer.compress, pieces)) + packer.flush()


def many_drops(last: bytes) -> bytes:
    return PLAN_HEAD + b"".join(DROP % (i, 1000 + i) for i in range(130_000)) + last


# For each name: (1) the type of the file, (2) a function that makes the file's bytes, and (3) a part of the
# expected message.
BIG = {
    "depth": (Plan, lambda: b"[" * 10**6, "found ["),
    "depth-in-moves": (Plan, lambda: PLAN_HEAD + b"[" * 10**6, "moves[0]: line 2, column 1: is a list"),
    "depth-of-objects": (
        Plan,
        lambda: PLAN_HEAD + b'{"a":' * 10**6 + b"}",
        "moves[0].a: line 2, column 6: is an object",
    ),
    "digits": (Plan, lambda: b'{"budget_bytes":' + b"9" * 15 * MIB + b"}", "more than 16 digits"),
    "string": (Plan, lambda: b'{"fingerprint":"' + b"a" * 15 * MIB + b'"}', "longer than 2**20"),
    "escapes": (Plan, lambda: b'{"fingerprint":"' + b"\\u0041" * (2 * MIB) + b'"}', "longer than 2**20"),
    "key": (Plan, lambda: b'{"' + b"a" * 15 * MIB + b'":1}', "longer than 2**20"),
    "keys-of-one-entry": (
        Plan,
        lambda: PLAN_HEAD + b"{" + b",".join(b'"k%d":1' % (i % 79_999) for i in range(80_000)) + b"}]}",
        "moves[0].k0: line 2, column 1: appears twice",
    ),
    "white-space": (
        Plan,
        lambda: PLAN_HEAD + b"\n" * 15 * MIB + b"]}",
        "more white space than one entry may have",
    ),
    "empty-entries": (
        Plan,
        lambda: PLAN_HEAD + b"{}," * (5 * MIB) + b"{}]}",
        "moves[0].move: line 2, column 1: is missing",
    ),
    "numbers": (Plan, lambda: PLAN_HEAD + b"1," * (7 * MIB) + b"1]}", "moves[0]: line 2, column 1: found 1"),
    "last-of-130000-bad": (
        Plan,
        lambda: many_drops(b'{"move":"drop","tensor":"x","to":"b","free":1.5}]}'),
        "moves[130000].free: line 130002, column 45: is 1.5",
    ),
    "cut": (Plan, lambda: many_drops(b"")[:-30], "was the file truncated?"),
    "entries": (
        Plan,
        lambda: PLAN_HEAD + b'{"move":"drop","tensor":"a","to":"b","free":1},' * 140_000 + b"]}",
        "moves[131072]: line 2, column 6160385: is one too many",
    ),
    "names": (
        Plan,
        lambda: b'{"recompute":[' + b",".join(b'"%d"' % i for i in range(10**6)) + b"]}",
        "recompute[131072]: line 1",
    ),
    "bomb-of-zeros": (Profile, lambda: packed(b"\0" * MIB for _ in range(1024)), "claims 1 GiB unpacked"),
    "bomb-that-lies": (
        Plan,
        lambda: packed(b" " * MIB for _ in range(20))[:-4] + b"\1\0\0\0",
        "more white space than one entry may have",
    ),
    "bomb-of-names": (
        Plan,
        lambda: packed(iter([PLAN_HEAD, LONG_DROPS, LONG_DROPS]))[:-4] + b"\1\0\0\0",
        "is larger unpacked; a teraio-plan file holds at most 16 MiB",
    ),
    "bomb-of-kernels": (
        Profile,
        lambda: packed(piece for piece in [PROFILE_HEAD, *([KERNEL * 26_000] * 40)]),
        "the text ends here, in the middle; was the file truncated?",
    ),
    "cut-profile": (Profile, lambda: PROFILE_HEAD + KERNEL * 800_000, "does not end in } after"),
    "cut-profile-and-closed": (
        Profile,
        lambda: PROFILE_HEAD + KERNEL * 800_000 + b"{}",
        "the text ends here",
    ),
}


def refused(kind: type[fuzz_files.Data], path: Path) -> tuple[str, float, float]:
    """Read a file in a child process.

    Return the message, the child's CPU seconds, and the growth of its peak memory in MiB. The CPU seconds are
    divided by the machine's slowness, so that one limit is right on an idle and on a busy machine.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
            line = "was taken"
            try:
                kind.read(path)
            except FileFormatError as error:
                line = str(error)
            used = time.process_time() - start
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            os.write(write, f"{used / cpu_limit.slowness()} {grown} {line}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as pipe:
        used_text, grown_text, line = pipe.read().split(" ", 2)
    os.waitpid(child, 0)
    return line, float(used_text), float(grown_text)


@pytest.mark.parametrize("name", BIG)
def test_a_big_file_is_refused_in_little_time_and_memory(name: str, tmp_path: Path) -> None:
    kind, make, message = BIG[name]
    path = tmp_path / name
    path.write_bytes(make())
    line, used_s, grown_mib = refused(kind, path)
    assert message in line and line.isprintable() and len(line) < 700
    assert used_s < 2.0, f"{used_s:.2f} s"
    assert grown_mib < (64 if ONCE else 192), f"{grown_mib:.0f} MiB"


def test_a_path_that_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(10**10)
    messages = {
        tmp_path / "fifo": "is a FIFO; expected a regular file",
        tmp_path: "is a directory; expected a regular file",
        Path("/dev/zero"): "is a device; expected a regular file",
        tmp_path / "sparse": "is 9.3 GiB; a teraio-plan file holds at most 16 MiB",
        tmp_path / "missing": "No such file or directory",
        tmp_path / "loop": "symbolic links",
        tmp_path / "nul\0": "NUL",
        tmp_path / "\x1b[2J\n": r"\x1b[2J\n: No such file",
    }
    for path, words in messages.items():
        with cpu_limit.at_most(0.5), pytest.raises(FileFormatError) as error:
            Plan.read(path)
        assert words in str(error.value) and str(error.value).isprintable()


def test_a_text_or_plan_over_the_size_limit_is_refused() -> None:
    with pytest.raises(
        FileFormatError, match=r"is 16777217 characters; a teraio-plan file holds at most 16 MiB"
    ):
        Plan.loads(" " * (16 * MIB + 1))
    moves = tuple(Evict(f"{'x' * 1000}{i}", "ssd", 1) for i in range(17_000))
    with pytest.raises(FileFormatError, match=r"would be 17.1 MiB; a teraio-plan file holds at most 16 MiB"):
        Plan("", "", 1, (), moves).dumps()


def test_a_packed_file_of_repeated_text_is_refused_at_every_cut() -> None:
    """Cut a compressed file within its last 200 bytes.

    The text ends with 1 MiB of spaces. A few packed bytes unpack to more text than the reader unpacks at a
    time.
    """
    whole = packed(iter([fuzz_files.SEEDS[0].dumps().encode(), b" " * MIB]))
    for end in range(len(whole) - 200, len(whole)):
        with pytest.raises(FileFormatError, match="truncated"):
            type(fuzz_files.SEEDS[0]).loads(whole[:end])


@pytest.mark.parametrize("value", fuzz_files.SEEDS, ids=lambda value: type(value).__name__)
def test_a_file_cut_anywhere_is_refused(value: fuzz_files.Data) -> None:
    data = value.dumps().encode()
    for end in range(len(data) - 1):  # the newline at the end of a file is optional
        with pytest.raises(FileFormatError):
            type(value).loads(data[:end])
    whole = gzip.compress(data)
    for end in range(2, len(whole)):
        with pytest.raises(FileFormatError):
            type(value).loads(whole[:end])


def test_mutated_files_are_accepted_or_refused_without_other_errors(tmp_path: Path) -> None:
    tally = fuzz_files.fuzz(50_000, 1, str(tmp_path))
    assert tally.others == 0
    assert tally.values > 1000, "too few mutated files are valid, so the test is weak"
    assert tally.slowest_s < 1.0
