"""The scorecard, which runs all long proofs one after another and collects their figures.

    python tests/long/run.py [names] [--quick] [--json FILE | --table FILE]

Each proof is a script of this folder. `--quick` runs each script on a sample. A script prints lines of the
form `name value target PASS|FAIL` (says.py). The script's exit code becomes a figure in two cases: (1) the
script printed no line, or (2) the script failed without a FAIL line. The script prints a table in Markdown,
as in docs/reliability.md.

All proofs together take hours. `--json` writes a proof's figures as soon as the proof has ended, with the
machine, the day and the duration in seconds. The file keeps its rows of other proofs. `--table` prints such a
file and runs nothing. The script exits with 1 if a figure misses its target.
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
SAID_CHARS = 20_000  # a failed proof's output is printed up to this many characters, from its end


@dataclass(frozen=True, slots=True)
class Proof:
    script: str
    promise: str
    whole: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()


PROOFS = (
    Proof(
        "drive_faults",
        "a drive operation fails in the middle of a training: right numbers, or a named error",
        quick=("--stride", "40"),
    ),
    Proof(
        "transfer_faults",
        "the same for the transfer engine alone, in every order of completion; flipped bits are found",
        quick=("--seeds", "1", "--flips", "500"),
    ),
    Proof(
        "engine_schedules",
        "copies and kernels in every order on a fake device: no early read, no byte above the budget",
        quick=("--schedules", "200"),
    ),
    Proof(
        "differential",
        "generated models with random plans give the numbers of plain training",
        quick=("--eager", "20", "--inductor", "0", "--named", "0"),
    ),
    Proof(
        "hostile_plans",
        "well-formed plans that make no sense: the numbers of plain training, within the budget",
        quick=("--models", "4"),
    ),
    Proof(
        "what_people_do",
        "hooks, copies, pickles, workers, checkpoints, errors in a step: the same as without a budget",
    ),
    Proof("cases", "cases that a plain run of the tests leaves out, because it has similar ones"),
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
        "on small steps the exact planner finds the best of all plans, and no plan is below the bound",
        quick=("--seeds", "400"),
    ),
    Proof(
        "planner_random",
        "random or misleading steps: a plan or a proof that none exists, and no published system is faster",
        quick=("--count", "24"),
    ),
    Proof(
        "fuzz_files",
        "a mutated file is read correctly or refused, in bounded time and memory",
        ("--count", "1000000", "--seed", "0"),
        ("--count", "20000", "--seed", "0"),
    ),
    Proof(
        "attacks",
        "hostile links, modes, directories and files are refused, for root and for an ordinary user",
    ),
    Proof(
        "sanitizers",
        "the native parts with faults and hostile input: no race, no bad address, no undefined behaviour",
        quick=("--rounds", "50", "--instances", "2000"),
    ),
    Proof(
        "readers",
        "threads, an extension, finalizers and handlers read weights while a model trains: no wrong number",
        quick=("--seconds", "30"),
    ),
    Proof(
        "together",
        "processes share a store directory and a plan cache, one is killed: the others train correctly",
        quick=("--rounds", "2", "--steps", "20"),
    ),
    Proof(
        "kill",
        "after kill -9 no file and no byte remains",
        ("--moments", "200"),
        ("--moments", "10", "--times", "1"),
    ),
    Proof("kill_saves", "kill -9 in a save leaves the old file or the new one", quick=("--kills", "10")),
    Proof(
        "kill_steps",
        "kill -9 in a step, or in a save between two: the last checkpoint is whole, no byte remains",
        ("--kills", "180", "--out-of-memory", "20"),
        ("--kills", "10", "--out-of-memory", "2"),
    ),
    Proof(
        "rank_restart",
        "kill -9 of a rank: torchrun restarts, and the numbers equal those of a run without the kill",
        quick=("--steps", "4", "--kill-at", "2"),
    ),
    Proof(
        "interrupts",
        "Ctrl-C at any moment of a step: training can continue, with weights and states of whole steps",
        ("--count", "200"),
        ("--count", "20"),
    ),
    Proof(
        "signals",
        "a signal handler reads weights and states at any moment: all belong to whole steps",
        ("--count", "1000"),
        ("--count", "50"),
    ),
    Proof(
        "surroundings", "file systems and limits of the system: the same numbers, or an error with the reason"
    ),
    Proof(
        "planted",
        "planted bugs, one at a time: the tests that a patch names find each",
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
        "tensors are created and freed: nothing grows",
        quick=("--tensors", "2000", "--seconds", "0", "--stores", "4"),
    ),
)


def figures(proof: Proof, quick: bool) -> tuple[list[Figure], float]:
    """Run a proof. Return its figures and its duration in seconds."""
    arguments = proof.quick if quick else proof.whole
    command = [sys.executable, str(HERE / f"{proof.script}.py"), *arguments]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    took_s = time.monotonic() - began
    found = told(proof.script, done.stdout, done.returncode)
    # Print the output of a failed proof, because no file contains it.
    if any(figure.verdict == "FAIL" for figure in found):
        print((done.stdout + done.stderr)[-SAID_CHARS:], file=sys.stderr)
    return found, took_s


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [proof.script for proof in PROOFS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(names)}; default: all")
    parser.add_argument("--quick", action="store_true", help="a sample of each")
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--json", type=Path, metavar="FILE", help="file that keeps the figures")
    files.add_argument("--table", type=Path, metavar="FILE", help="print such a file, and run nothing")
    args = parser.parse_args()
    if unknown := set(args.names) - set(names):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if args.table and not args.table.exists():
        parser.error(f"there is no {args.table}")
    request = [proof for proof in PROOFS if proof.script in (args.names or names)]
    card = Scorecard(args.table or args.json, None if args.table else args.quick)
    for proof in () if args.table else request:
        print(f"{proof.script} ...", file=sys.stderr, flush=True)
        card.add(proof.script, *figures(proof, args.quick))
    found = card.figures(proof.script for proof in request)
    print(table(found, {proof.script: proof.promise for proof in PROOFS}))
    return 1 if any(figure.verdict == "FAIL" for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
