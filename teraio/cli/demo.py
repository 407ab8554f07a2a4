"""`teraio demo`: trains a small Llama twice and compares the runs.

The first run has no budget. The budget of the second run is by default a third of the first run's peak
memory. Each run has its own process, so that its memory can be measured separately. The demo measures the
bytes of tensors with teraio's allocator, which needs a C++ compiler. Without a compiler, the demo measures
the resident memory of the process. It then subtracts the memory that is not tensors (the interpreter, torch
and torch's compiler).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from statistics import median
from typing import Any

from teraio.errors import TeraioError
from teraio.progress import show_stage, tell_progress
from teraio.report.picture_data import picture_row_reached_by
from teraio.report.terminal_text import MARGIN, WIDTH
from teraio.terminal import PLAIN, Terminal, terminal_of
from teraio.text_table import aligned_text_table
from teraio.units import fmt_bytes

# The demo does not time the first five steps: one step compiles, one step creates the optimizer states, and
# teraio measures three steps.
WARMUP = 5
PAUSE_S = 0.2
# The most steps before timing begins. If a step is far slower than predicted, teraio measures and plans
# again. It may also compare steps with and without late updates. Both take more than WARMUP steps.
WARMUP_MOST = 40
TABLE_WIDTH = 76  # columns of the table; a narrower terminal gets a narrower table


DESCRIPTION = """\
Trains a small Llama with AdamW twice, each time in a process of its own: plainly (without a budget), then
within a part of that peak memory. Prints both side by side, whether the losses are equal bit for bit, and a
picture of memory over one step. Takes about a minute on two cores; `--inner eager` takes half of that."""

EPILOG = """\
examples:
  teraio demo
  teraio demo --part 0.3 --inner eager
  teraio demo --layers 12 --batch 4 --json

exit codes: 0 losses are equal, 1 they are not or a run failed"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "--part", type=_parse_part_of_peak, default=1 / 3, help="the budget, as a part of the plain peak"
    )
    parser.add_argument("--inner", choices=("inductor", "eager"), default="inductor", help="inner program")
    parser.add_argument("--steps", type=_parse_count, default=5, help="measured steps")
    parser.add_argument("--layers", type=_parse_count, default=6, help="layers of the model")
    parser.add_argument("--batch", type=_parse_count, default=8, help="sequences in a batch")
    parser.add_argument("--length", type=_parse_count, default=256, help="tokens in a sequence")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _parse_part_of_peak(text: str) -> float:
    try:
        part = float(text)
    except ValueError:
        part = 0.0
    if not 0 < part < 100:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no part of the plain peak: 0.5 is half of it, 1 all of it"
        )
    return part


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1 on")
    return int(text)


def main(args: argparse.Namespace) -> int:
    if args.child is not None:
        print(json.dumps(_train_and_measure(args)))
        return 0
    say = (lambda text: None) if args.json else print
    say(
        f"A Llama of {args.layers} layers, AdamW, batch {args.batch} x {args.length} tokens, "
        f"{WARMUP} + {args.steps} steps, inner program {args.inner}."
    )
    say("1/2 plainly ...")
    plain = _train_in_child(args, 0)
    budget = int(plain["tensor_peak_bytes"] * args.part)
    say(f"    {fmt_bytes(plain['tensor_peak_bytes'])}, {plain['step_s']:.2f} s per step")
    say(f"2/2 within {fmt_bytes(budget)} ({args.part:.0%} of that) ...")
    ours = _train_in_child(args, budget)
    equal = all(one == other for one, other in zip(plain["losses"], ours["losses"]))
    if args.json:
        print(json.dumps({"plain": plain, "teraio": ours, "budget_bytes": budget, "equal": equal}))
    else:
        terminal = terminal_of(sys.stdout)
        print(_comparison_table(plain, ours, budget, equal, terminal))
        print(_memory_picture(plain["memory"], ours["memory"], budget, terminal=terminal))
    return 0 if equal else 1


def _train_in_child(args: argparse.Namespace, budget: int) -> dict[str, Any]:
    """Train in a new process, and return the figures of this run. A `budget` of 0 means no budget."""
    command = [sys.executable, "-m", "teraio", "demo", "--child", str(budget), "--inner", args.inner]
    for name in ("steps", "layers", "batch", "length"):
        command += [f"--{name}", str(getattr(args, name))]
    environment = {**os.environ, "TERAIO_DISABLE": "" if budget else "1"}
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as run:
            assert run.stdout is not None
            result = _read_child_output(run.stdout, args, "within the budget" if budget else "plainly")
        errors.seek(0)
        if run.returncode != 0:
            raise TeraioError(
                f"the {'budgeted' if budget else 'plain'} run failed:\n{errors.read().strip()[-2000:]}"
            )
    return result


def _read_child_output(lines: Iterable[str], args: argparse.Namespace, how: str) -> dict[str, Any]:
    """Show the progress of a run, and return its figures.

    The child process prints one JSON line per step, and then one JSON line with the figures.
    """
    figures: dict[str, Any] = {}
    steps, found = WARMUP + args.steps + 1, (json.loads(line) for line in lines if line.startswith("{"))
    with show_stage("teraio demo"):
        with show_stage(
            f"{how}, step 1 of {steps}: compiling" if args.inner == "inductor" else f"{how}, step 1"
        ):
            figures = next(found, figures)
        with show_stage(how):
            tell_progress(f"step 2 of {steps}")
            for figures in found:
                if "step" in figures:
                    tell_progress(f"step {figures['step'] + 1} of {max(steps, figures['step'] + 1)}")
    return figures


def _train_and_measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train in this child process, and return losses, times and memory use."""
    import torch

    from teraio.cli.demo_model import Llama, Shape
    from teraio.runtime.device import cpu, rss
    from teraio.session import session

    device = cpu.CpuDevice()
    # In the run without a budget, the allocator may keep freed memory for later tensors, as malloc does.
    device.limit_tensors_and_spare_memory(device.capacity_bytes())
    # Use one compute thread. With two threads, atomic additions run in any order, so even two runs without a
    # budget would differ in the last bit.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(Shape(layers=args.layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    budget = int(args.child)
    options = {"inner": args.inner, **({"memory": budget} if budget else {})}
    compiled = torch.compile(model, backend="teraio", options=options)
    random = torch.Generator().manual_seed(1)
    losses: list[float] = []
    times: list[float] = []

    def train_one_step() -> None:
        tokens = torch.randint(0, model.shape.vocabulary, (args.batch, args.length + 1), generator=random)
        began = time.perf_counter()
        loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - began)
        print(json.dumps({"step": len(losses)}), flush=True)

    while len(losses) < WARMUP or not (_is_steady(budget) or len(losses) > WARMUP_MOST):
        train_one_step()
    for _ in range(args.steps):
        train_one_step()
    stats = session.stats()
    time.sleep(PAUSE_S)  # wait until fetches in flight end, because the next step's memory is sampled
    alive = stats["resident_bytes"] if budget else _weight_and_state_bytes(optimizer)
    base = 0 if device.spares else device.used_bytes() - alive  # bytes of the process that are not tensors
    device.reset_peak()
    rss.reset_peak()
    memory: list[int] = []
    with _MemorySampler(memory, device.used_bytes):
        train_one_step()
    return {
        "losses": losses,
        "step_s": median(times[-args.steps - 1 : -1]),
        "tensor_peak_bytes": device.peak_bytes() - base,
        "process_peak_bytes": rss.peak_bytes(),
        "tokens": args.batch * args.length,
        "memory": [max(0, m - base) for m in memory],
        "stats": stats,
    }


def _is_steady(budget: int) -> bool:
    from teraio.session import session

    return not budget or session.stats()["steady"]


def _weight_and_state_bytes(optimizer: Any) -> int:
    """Return the bytes of the weights and optimizer states, between two steps of the run without a budget.

    Do not call this in the run with a budget: it accesses each tensor, so the engine would fetch evicted
    tensors.
    """
    import torch

    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    tensors += [
        v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)
    ]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


class _MemorySampler:
    """A context manager that appends the number of bytes in use to a list every 4 ms."""

    def __init__(self, into: list[int], used_bytes: Callable[[], int]) -> None:
        self.into = into
        self.used_bytes = used_bytes
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._sample_until_stopped, daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *exception: object) -> None:
        self.stop.set()
        self.thread.join()

    def _sample_until_stopped(self) -> None:
        while not self.stop.wait(0.004):
            self.into.append(self.used_bytes())


def _comparison_table(
    plain: dict[str, Any], ours: dict[str, Any], budget: int, equal: bool, terminal: Terminal = PLAIN
) -> str:
    stats = ours["stats"]
    rows = [
        ("", "plain", "teraio"),
        ("memory allowed", "-", fmt_bytes(budget)),
        (
            "peak memory of tensors",
            fmt_bytes(plain["tensor_peak_bytes"]),
            fmt_bytes(ours["tensor_peak_bytes"]),
        ),
        (
            "peak memory of the process",
            fmt_bytes(plain["process_peak_bytes"]),
            fmt_bytes(ours["process_peak_bytes"]),
        ),
        ("time per step", f"{plain['step_s']:.2f} s", f"{ours['step_s']:.2f} s"),
        ("tokens per second", *(f"{r['tokens'] / r['step_s']:.0f}" for r in (plain, ours))),
        ("no plan takes less than", "-", f"{stats['bound_ns'] / 1e9:.2f} s" if "bound_ns" in stats else "-"),
        (
            "written to / read from disk",
            "-",
            f"{fmt_bytes(stats['step_written_bytes'])} / {fmt_bytes(stats['step_read_bytes'])}",
        ),
        ("waited for the disk", "-", f"{stats['step_stall_ns'] / 1e9:.2f} s"),
        ("fetches that no plan asked for", "-", str(stats["step_misses"])),
        ("losses equal, bit for bit", "", "yes" if equal else "NO"),
    ]
    if 0 < terminal.width < TABLE_WIDTH:
        return aligned_text_table(rows, terminal=terminal)
    lines = [f"  {name:<32}{one:>14}{other:>26}" for name, one, other in rows]
    lines[0] = terminal.paint(lines[0], "bold")
    lines[-1] = terminal.paint(lines[-1], "green" if equal else "red")
    return "\n".join(lines)


def _memory_picture(
    plain: list[int], ours: list[int], budget: int, height: int = 12, terminal: Terminal = PLAIN
) -> str:
    """Draw the memory over one step as text: the run without a budget, the run with a budget, and a line at
    the budget.
    """
    top = max([*plain, *ours, 1])
    width = min(terminal.width - MARGIN - 1, WIDTH) if terminal.width else WIDTH

    def peak_per_column(samples: list[int]) -> list[int]:
        count = max(1, len(samples))
        return [max(samples[i * count // width : (i + 1) * count // width + 1] or [0]) for i in range(width)]

    one, other = peak_per_column(plain), peak_per_column(ours)
    lines = []
    for row in range(height, 0, -1):
        level = top * (row - 0.5) / height
        line = "".join("#" if b >= level else ":" if a >= level else " " for a, b in zip(one, other))
        if row == picture_row_reached_by(budget, top, height):
            line = "".join(c if c == "#" else "-" for c in line)
        shown = "".join(_painted_cells(cell, len([*cells]), terminal) for cell, cells in groupby(line))
        lines.append(f"  {fmt_bytes(int(top * row / height)):>10} |{shown}")
    lines.append(f"  {'':>10} +{'-' * width}")
    marks = ((":", 1, "plain"), ("#", 1, "teraio"), ("-", 3, "the budget"))
    legend = "   ".join(f"{_painted_cells(cell, count, terminal)} {word}" for cell, count, word in marks)
    wide = not terminal.width or terminal.width > MARGIN + len(
        "one step   : plain   # teraio   --- the budget"
    )
    lines.append(f"  {'':>10}  {'one step   ' if wide else ''}{legend}")
    return "\n".join(lines)


def _painted_cells(cell: str, count: int, terminal: Terminal) -> str:
    """Return `count` equal cells of the picture. A terminal with colours shows memory as coloured blocks."""
    match cell:
        case "#":
            return terminal.paint(cell * count, "blue", block=True)
        case ":":
            return terminal.paint(cell * count, "grey", block=True)
        case "-":
            return terminal.paint(cell * count, "bold")
        case _:
            return cell * count
