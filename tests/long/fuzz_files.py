"""A fuzzer of profiles, machines, plans and timelines. Each mutated file must give a value or a
FileFormatError.

    python tests/long/fuzz_files.py --count 1000000 --seed 0

Half of the mutations change bytes, and half change values of the parsed tree. An oracle that shares no code
with the reader checks each accepted value. The oracle requires whole numbers in range, plain names, no key
twice, and ticks in order. Reading the text of an accepted value must return an equal value. An error must be
one printable line. The fuzzer measures CPU time per file, and memory over the whole run. The script prints
lines `name value target PASS|FAIL`, and exits with 1 if a line says FAIL.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gzip
import json
import os
import random
import re
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from says import at_most, exactly

from teraio.errors import FileFormatError
from teraio.formats.machine import Link, Machine, Tier
from teraio.formats.plan import Evict, Fetch, Home, Plan
from teraio.formats.profile import Kernel, Profile, Tensor
from teraio.formats.timeline import Counter, Span, Stall, Timeline

Data = Profile | Machine | Plan | Timeline
SECONDS_MAX = 1.0
MEMORY_MIB_MAX = 64
READ_EVERY = 100  # the fuzzer writes one in this many files to the disk, and reads it from there

SEEDS: tuple[Data, ...] = (
    Profile(
        "tiny",
        12,
        tuple(Kernel(f"mm_{i}", i // 2, 10 + i, i, None if i % 2 else 20) for i in range(5)),
        (
            Tensor("layers.0.w", "weight", 64, True, (0, 3), (4,)),
            Tensor("layers.0.w.exp_avg", "state", 64, True, (4,), (4,)),
            Tensor("act", "activation", 32, False, (1, 2), (0,), (0,)),
            Tensor("größe/日本", "input", 8, False, (0,), ()),
        ),
    ),
    Machine(
        "toy",
        (Tier("device", 8), Tier("host", 100), Tier("ssd", 1000)),
        (Link("device", "host", 5, 0, "up"), Link("host", "device", 5), Link("device", "ssd", 1, 9, "up")),
        (("up", 6),),
    ),
    Plan(
        "0123abcd",
        "auto",
        8,
        (Home("layers.0.w", "ssd"), Home("b", "host")),
        (Evict("layers.0.w", "host", 20, 13), Fetch("layers.0.w", "host", 30, 40), Evict("b", "ssd", 3)),
        ("act",),
    ),
    Timeline(
        "measured",
        (Span("compute", "mm_0", 0, 10), Span("evict:ssd", "w", 3, 9, 64, "w")),
        (Counter("device", "weight", 0, 64),),
        (Stall(3, "w", 5, "late read"),),
    ),
)
TEXTS = tuple(value.dumps().encode() for value in SEEDS)

# fmt: off
TOKENS = (
    b"1e308", b"NaN", b"-Infinity", b"-1", b"-0", b"0.0", b"1.", b"01", b"1E2", b"9007199254740991",
    b"9007199254740992", b"9223372036854775808", b"9" * 5000, b"true", b"null", b'""', b"[]", b"{}",
    b"[" * 2000, b'{"a":' * 500, b"\0", b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\\u0000",
    b"\\ud800", b"\\",
    b'"', b",", b":", b"\x1b[2J", b'"\\u001b]0;x\\u0007"', b'"../../../etc/passwd"', b'"a":1,', b"/**/",
    b"\x1f\x8b\x08", b" " * 3000,
)
LEAVES: tuple[Any, ...] = (
    0, 1, -1, 2**31, 2**32, 2**33, 2**53 - 1, 2**53, 2**63, 2**64, 10**40, 0.0, 1.5, 1e308, float("nan"),
    float("inf"), True, False, None, "", "device", "ssd", "w", "x" * 1024, "x" * 1025, "\x00", "\x1b[31m",
    "a\nb", "\u202e", "\ud800", "../../x", [], [0], [1, 0], [0, 0], [0, 1.0], [True], ["a"], [[]], [2**60],
    {}, {"a": 1}, {"capacity_bytes": 1},
)
# fmt: on


def turn_bytes(random_: random.Random, data: bytes) -> bytes:
    """Return the text with a few changes of its bytes."""
    for _ in range(random_.choice((1, 1, 1, 2, 5))):
        at = random_.randrange(len(data) + 1)
        end = min(len(data), at + random_.choice((1, 1, 2, 8, 40)))
        match random_.randrange(6):
            case 0:
                data = data[:at] + bytes([random_.randrange(256)]) + data[end:]
            case 1:
                data = data[:at] + data[end:]
            case 2:
                data = data[:at] + random_.choice(TOKENS) + data[end:]
            case 3:
                data = data[:at] + data[at:end] * 2 + data[end:]
            case 4:
                data = data[:at] + random_.choice(TOKENS) + data[at:]
            case 5 if random_.random() < 0.3:
                data = data[:at]
            case _:
                data = data[:at] + random_.randbytes(end - at) + data[end:]
    return data


def turn_tree(random_: random.Random, data: bytes) -> bytes:
    """Return the text after changes of its parsed tree. Values are replaced, moved, renamed, added or
    removed.
    """
    top = json.loads(data)
    for _ in range(random_.choice((1, 1, 1, 2, 4))):
        node: Any = top
        while True:
            keys: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = random_.choice(keys)
            if not isinstance(node[key], dict | list) or random_.random() < 0.2:
                turn_entry(random_, node, key)
                break
            node = node[key]
    space = random_.choice((None, None, 1, 0))
    text = json.dumps(top, indent=space, ensure_ascii=random_.random() < 0.5)
    if random_.random() < 0.1:  # a duplicate key, which a parsed tree cannot hold
        pairs = list(re.finditer(r'"[a-z_]+": ?(?:"[^"]*"|[0-9]+), ?', text))
        pair = random_.choice(pairs) if pairs else None
        text = text[: pair.end()] + pair[0] + text[pair.end() :] if pair else text
    return text.encode("utf-8", "surrogatepass")


def turn_packed(random_: random.Random, turned: bytes, whole: bytes) -> bytes:
    """Return a gzip stream with a fault. The fault is in the content, in the stream, or at the end of the
    stream."""
    match random_.randrange(3):
        case 0:
            return gzip.compress(turned, 1)
        case 1:
            return turn_bytes(random_, gzip.compress(whole, 1))
        case _:
            return gzip.compress(whole, 1)[: -random_.randrange(1, 12)]


def turn_entry(random_: random.Random, node: Any, key: Any) -> None:
    match random_.randrange(5):
        case 0 if isinstance(node, dict):
            node[random_.choice((str(key) + "x", "name", "tensor", "\x1b", "free", "__class__"))] = node.pop(
                key
            )
        case 1:
            del node[key]
        case 2 if isinstance(node, list):
            node.append(node[key])
        case 3 if isinstance(node[key], int):
            node[key] += random_.choice((-1, 1, -12, 12, 2**32))
        case _:
            node[key] = copy.deepcopy(random_.choice(LEAVES))


def strange(value: Any) -> str:
    """Return the fault of a value that the reader accepted, or "". The rules are written independently of the
    reader.
    """
    wrong = False
    if dataclasses.is_dataclass(value):
        whats = (
            strange_field(str(field.type), getattr(value, field.name)) for field in dataclasses.fields(value)
        )
        return next(filter(None, whats), "") or strange_together(value)
    if isinstance(value, tuple):
        return next(filter(None, map(strange, value)), "")
    if isinstance(value, str):
        wrong = len(value) > 1024 or any(ord(c) < 32 for c in value)
    elif value is not None:
        wrong = not isinstance(value, int) or not 0 <= value < 2**53
    return f"{value!r} should not have been accepted" if wrong else ""


def strange_field(kind: str, value: Any) -> str:
    """Check a field's value, first against the field's annotation, then by the rules for single values."""
    right = {"int": int, "str": str, "bool": bool}.get(kind.removesuffix(" | None"))
    if (value is None and "None" not in kind) or (right and value is not None and type(value) is not right):
        return f"{value!r} should be {kind}"
    return strange(value)


def strange_together(value: Any) -> str:
    """Check the rules that concern several fields of a value."""
    wrong = False
    match value:
        case Evict(trigger=int(first), free=last) | Fetch(trigger=int(first), ready=last):
            wrong = first > last
        case Tensor(reads=reads, writes=writes):
            wrong = any(list(ticks) != sorted(set(ticks)) for ticks in (reads, writes))
        case Profile(kernels=kernels, tensors=tensors):
            wrong = any(tick >= len(kernels) for t in tensors for tick in t.reads + t.writes)
            wrong |= len({tensor.name for tensor in tensors}) < len(tensors)
        case Machine(tiers=tiers, links=links):
            names = {tier.name for tier in tiers}
            wrong = not {end for link in links for end in (link.source, link.target)} <= names
    return f"{value} contradicts itself" if wrong else ""


def no_key_twice(pairs: list[tuple[str, Any]]) -> None:
    assert len(dict(pairs)) == len(pairs), "a key appears twice"


def outcome(read: Callable[[bytes], Data], data: bytes) -> str:
    """Return "value" if the reader accepted the data, and "error" if it raised a FileFormatError.

    Raise AssertionError if the value or the error breaks a rule. Other errors of the reader are not caught.
    """
    try:
        value = read(data)
    except FileFormatError as error:
        line = str(error)
        assert line.isprintable() and 20 < len(line) < 700, f"not one short line: {line!r}"
        return "error"
    assert not (what := strange(value)), what
    json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data, object_pairs_hook=no_key_twice)
    assert type(value).loads(value.dumps()) == value, "reading its own text gives another value"
    return "value"


@dataclasses.dataclass
class Tally:
    count: int = 0
    values: int = 0
    others: int = 0
    slowest_s: float = 0.0


OPENED: list[str] = []  # names of the files that this process opened during a read
WATCHED = False


def watch() -> None:
    """Record the name of every file that this process opens from now on."""
    global WATCHED
    # Python loads this codec from a file at its first use. Use it before the hook records files.
    "\x1b".encode("unicode_escape")
    if not WATCHED:
        sys.addaudithook(lambda event, args: OPENED.append(str(args[0])) if event == "open" else None)
        WATCHED = True


def fuzz(count: int, seed: int, folder: str) -> Tally:
    """Read `count` mutated files. A seed always gives the same files. Print the first few wrong outcomes."""
    random_ = random.Random(seed)
    tally = Tally()
    path = os.path.join(folder, "mutated.json")
    watch()
    for number in range(count):
        which = random_.randrange(len(SEEDS))
        kind = type(SEEDS[which])
        data = (turn_bytes if random_.random() < 0.5 else turn_tree)(random_, TEXTS[which])
        if random_.random() < 0.03:
            data = turn_packed(random_, data, TEXTS[which])
        kind = type(random_.choice(SEEDS)) if random_.random() < 0.01 else kind

        def from_file(data: bytes, kind: type[Data] = kind) -> Data:
            with open(path, "wb") as file:
                file.write(data)
            return kind.read(path)

        OPENED.clear()
        start = time.process_time()
        try:
            tally.values += outcome(from_file if number % READ_EVERY == 0 else kind.loads, data) == "value"
            assert set(OPENED) <= {path}, f"opened {OPENED}"
        except Exception as error:  # noqa: BLE001  the run searches for such errors
            tally.others += 1
            if tally.others <= 5:
                print(f"seed {seed}, file {number}: {error!r} from {data[:2000]!r}", file=sys.stderr)
                traceback.print_exception(error, limit=-4)
        tally.slowest_s = max(tally.slowest_s, time.process_time() - start)
        tally.count += 1
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        tally = fuzz(arguments.count, arguments.seed, folder)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    rate = tally.count / (time.process_time() - start)
    print(f"{tally.count} files, {tally.values} accepted, {rate:.0f} per CPU second", file=sys.stderr)
    fine = exactly("fuzz-files-other-outcomes", tally.others)
    fine &= at_most("fuzz-files-slowest-s", tally.slowest_s, SECONDS_MAX)
    fine &= at_most("fuzz-files-memory-mib", grown_mib, MEMORY_MIB_MAX)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
