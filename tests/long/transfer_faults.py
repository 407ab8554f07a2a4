"""A run of every fault of the transfer engine's operations, and of many bit flips in stored files.

    python tests/long/transfer_faults.py [--seeds 8] [--flips 10000] [--dir /mnt/ssd]

Every operation of a scripted workload fails in turn, in every way. Each fault occurs one time in one run, and
permanently in another run. The workload runs on the deterministic engine with many orders of completion, and
on the engine with threads. The script prints lines `name value target PASS|FAIL`, and exits with 1 if a line
says FAIL.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from says import at_least, exactly
from transfer_rig import BLOCK, Memory, Outcome, Rig, fault_rules, one_fault

from teraio.errors import CorruptTensorError


class Hang(Exception):
    """An error for a run that takes more than a minute."""


def on_alarm(_number: int, _frame: FrameType | None) -> None:
    raise Hang


class Tally:
    def __init__(self) -> None:
        self.injected = self.wrong = self.hangs = self.unusable = self.runs = 0

    def run(self, rig: Rig, rule: dict[str, Any], threads: bool = False) -> bool:
        """Run the workload one time. Return True if the fault rule hit an operation."""
        self.runs += 1
        signal.alarm(60)
        try:
            outcome = one_fault(
                rig, rule, deadline_s=0.5 if threads and rule["kind"] in ("drop", "stall") else 0.0
            )
        except Hang:
            self.hangs += 1
            outcome = Outcome(hits=1)
        except AssertionError as e:
            print(e, file=sys.stderr)
            self.unusable += 1
            outcome = Outcome(hits=1)
        finally:
            signal.alarm(0)
        self.injected += outcome.hits
        self.wrong += outcome.wrong
        if outcome.wrong:
            print("wrong bytes:", rule, file=sys.stderr)
        return outcome.hits > 0


def in_memory(tally: Tally, seed: int) -> None:
    for rule in fault_rules():
        nth = 0
        hit = True
        while hit and tally.hangs < 5:
            nth += 1
            memory = {"jitter": 3.0, "seed": seed * 1000 + nth}
            with Rig(files=2, slabs=12, depth=3, memory=memory) as rig:
                hit = tally.run(rig, {**rule, "nth": nth})


def on_threads(tally: Tally, folder: Path) -> None:
    for rule in fault_rules():
        nth = 0
        hit = True
        while hit and tally.hangs < 5:
            nth += 1
            with Rig(folder, files=2, slabs=12, depth=3) as rig:
                hit = tally.run(rig, {**rule, "nth": nth}, threads=True)


def flips_found(count: int) -> int:
    """Flip one bit of a stored file at a time. Return the number of flips that the store detected."""
    draw = random.Random(11)
    found = 0
    with Rig() as rig:
        source = Memory(9 * 16 * BLOCK + 1234, seed=3)
        target = Memory(source.size)
        rig.out(source, [(0, 0, source.size)])
        for _ in range(count):
            bit = draw.randrange(source.size * 8)
            old = rig.inner.peek(0, bit // 8, 1)
            rig.inner.poke(0, bit // 8, bytes([old[0] ^ 1 << bit % 8]))
            try:
                rig.into(target, [(0, 0, source.size)])
            except CorruptTensorError:
                found += 1
            rig.inner.poke(0, bit // 8, old)
        rig.into(target, [(0, 0, source.size)])
        assert target.get() == source.get()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--dir", type=Path, default=None)
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, on_alarm)
    tally = Tally()
    for seed in range(args.seeds):
        in_memory(tally, seed)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        on_threads(tally, Path(folder))
    found = flips_found(args.flips)
    good = at_least("transfer-faults-injected", tally.injected, 2000)
    good &= exactly("transfer-faults-silent-wrong-bytes", tally.wrong)
    good &= exactly("transfer-faults-hangs", tally.hangs)
    good &= exactly("transfer-faults-engines-unusable-afterwards", tally.unusable)
    good &= exactly("transfer-faults-bit-flips-found", found, args.flips)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
