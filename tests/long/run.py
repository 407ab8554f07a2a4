"""The scorecard: the long proofs one after another, each with its figures.

    python tests/long/run.py [names] [--quick] [--json FILE | --table FILE]

Each row is a script of this folder; `--quick` gives it a sample of its work. A script prints lines of the
form `name value target PASS|FAIL` (says.py); one that prints none, or ends badly, is a figure of its own.
Prints a table in Markdown, as docs/reliability.md has it. All of them take hours: `--json` keeps what a proof
found as soon as it has ended, with the machine, the day and the seconds, and of proofs that are not run now
what the file had; `--table` prints what is in such a file, and runs nothing. Exit code 0 or 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from scorecard import Figure, Scorecard, table, told

HERE = Path(__file__).parent
SAID_CHARS = 20_000  # of a proof that failed


@dataclass(frozen=True, slots=True)
class Proof:
    script: str
    promise: str
    whole: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()


PROOFS = (
    Proof(
        "drive_faults",
        "an operation of the drive fails in the middle of a training: right numbers, or an error of ours",
        quick=("--stride", "40"),
    ),
    Proof(
        "transfer_faults",
        "the same for the transfer engine alone, in every order of completion; flipped bits are found",
        quick=("--seeds", "1", "--flips", "500"),
    ),
    Proof(
        "engine_schedules",
        "copies and kernels in every order on a fake device: nothing is read early, nothing above the budget",
        quick=("--schedules", "200"),
    ),
    Proof(
        "differential",
        "generated models with random plans give the numbers of plain training",
        quick=("--eager", "20", "--inductor", "0", "--named", "0"),
    ),
    Proof(
        "hostile_plans",
        "well-formed plans without sense: the numbers of plain training, within the budget",
        quick=("--models", "4"),
    ),
    Proof(
        "what_people_do",
        "hooks, copies, pickles, workers, checkpoints, errors in the middle: the same as without a budget",
    ),
    Proof("cases", "what the suites of tests leave out, as it is much like what they have"),
    Proof("optimizers", "every optimizer and every loop around it gives the numbers of plain training"),
    Proof(
        "zoo",
        "classes of Hugging Face under three budgets: same numbers, within the budget",
        quick=("--steps", "3"),
    ),
    Proof(
        "what_strangers_write",
        "models and loops of other libraries, drawn by a seed, in the smallest budget: the same numbers",
        quick=("--family", "hugging_face", "--count", "3", "--inductor-every", "0"),
    ),
    Proof(
        "gpu_path",
        "the path for GPUs with the CUDA build of torch on a stand-in for the driver: no wait is missing",
        whole=("--all",),
    ),
    Proof("train_loops", "training loops that others wrote give the numbers of plain training"),
    Proof(
        "planner_exact",
        "on small steps the exact planner is as good as trying everything, and the bound is one",
        quick=("--seeds", "400"),
    ),
    Proof(
        "planner_random",
        "steps that are random or made to mislead: a plan or a proof, a bound, no published system is faster",
        quick=("--count", "24"),
    ),
    Proof(
        "fuzz_files",
        "a mutated file is read right or refused, in bounded time and memory",
        ("--count", "1000000", "--seed", "0"),
        ("--count", "20000", "--seed", "0"),
    ),
    Proof(
        "attacks",
        "links, modes, directories of others, files made to mislead: as root and as an ordinary user",
    ),
    Proof(
        "sanitizers",
        "the native parts with faults and hostile input: no race, no bad address, nothing undefined",
        quick=("--rounds", "50", "--instances", "2000"),
    ),
    Proof(
        "readers",
        "threads, an extension, finalizers and handlers read weights while a model trains: no wrong number",
        quick=("--seconds", "30"),
    ),
    Proof(
        "together",
        "processes in one directory and with one cache of plans, one of them killed: no one notices",
        quick=("--rounds", "2", "--steps", "20"),
    ),
    Proof(
        "kill",
        "after kill -9 no file and no byte is left",
        ("--moments", "200"),
        ("--moments", "10", "--times", "1"),
    ),
    Proof("kill_saves", "kill -9 in a save leaves the old file or the new one", quick=("--kills", "10")),
    Proof(
        "kill_steps",
        "kill -9 in a step or in a save between two: the last checkpoint is whole, no byte is left",
        ("--kills", "180", "--out-of-memory", "20"),
        ("--kills", "10", "--out-of-memory", "2"),
    ),
    Proof(
        "interrupts",
        "Ctrl-C at any moment of a step: the model goes on, with weights and states of whole steps",
        ("--count", "200"),
        ("--count", "20"),
    ),
    Proof(
        "signals",
        "the handler of a signal reads weights and states at any moment: they are those of whole steps",
        ("--count", "1000"),
        ("--count", "50"),
    ),
    Proof(
        "surroundings", "file systems and limits of the system: the same numbers, or an error that says why"
    ),
    Proof(
        "planted",
        "bugs that a tired engineer could write, one at a time: the tests that a patch names find each",
        quick=(
            "plan-for-more-memory",
            "allocation-kept",
            "copy-good-for-ever",
            "half-written-file-left",
            "bad-block-used-again",
            "abandoned-call-counts",
        ),
    ),
    Proof("steps", "thousands of training steps: nothing grows", quick=("--steps", "300")),
    Proof(
        "churn",
        "tensors come and go: nothing grows",
        quick=("--tensors", "2000", "--seconds", "0", "--stores", "4"),
    ),
)


def figures(proof: Proof, quick: bool) -> tuple[list[Figure], float]:
    """What the script says, and how many seconds it took."""
    arguments = proof.quick if quick else proof.whole
    command = [sys.executable, str(HERE / f"{proof.script}.py"), *arguments]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    took_s = time.monotonic() - began
    found = told(proof.script, done.stdout, done.returncode)
    if any(figure.verdict == "FAIL" for figure in found):  # what it had to say of that is nowhere else
        print((done.stdout + done.stderr)[-SAID_CHARS:], file=sys.stderr)
    return found, took_s


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [proof.script for proof in PROOFS]
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all if none is given"
    )
    parser.add_argument("--quick", action="store_true", help="a sample of each")
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--json", type=Path, metavar="FILE", help="keep here what was found")
    files.add_argument("--table", type=Path, metavar="FILE", help="print what such a file has, run nothing")
    args = parser.parse_args()
    if unknown := set(args.names) - set(names):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if args.table and not args.table.exists():
        parser.error(f"there is no {args.table}")
    asked = [proof for proof in PROOFS if proof.script in (args.names or names)]
    card = Scorecard(args.table or args.json, None if args.table else args.quick)
    for proof in () if args.table else asked:
        print(f"{proof.script} ...", file=sys.stderr, flush=True)
        card.add(proof.script, *figures(proof, args.quick))
    found = card.figures(proof.script for proof in asked)
    print(table(found, {proof.script: proof.promise for proof in PROOFS}))
    return 1 if any(figure.verdict == "FAIL" for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
