"""`teraio profile`: shows a profile, lists profiles, and makes profiles of well-known models.

A profile describes the kernels and tensors of one training step. `teraio profile synth` computes a profile
without loading the model, and without access to the machine.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, get_args

from teraio.errors import OptionError
from teraio.formats import shipped_files
from teraio.formats.plan import Plan
from teraio.formats.profile import Kind, Profile
from teraio.terminal import terminal_of
from teraio.text_table import table_for_stdout
from teraio.units import LIMIT, fmt_bytes, fmt_count, fmt_ns, parse_ns, parse_rate, printable_line

from .plan_request import PROFILE, read_or_synthesize_profile

if TYPE_CHECKING:
    from teraio.passes.synth.roofline import Rates

WHOLE = """\
A profile describes a step: its kernels in order with their durations, and its tensors with their sizes and
uses. A planner makes plans from it. A run writes one with options={'profile': 'run.profile.json'}. These
commands show a profile, or make one without the model and the machine."""

WHOLE_EPILOG = """\
examples:
  teraio profile list
  teraio profile show run.profile.json
  teraio profile synth llama-3.1-8b --batch 4 -o 8b.profile.json.gz"""

DESCRIPTION = """\
Writes the profile of one training step of a well-known model: every kernel with the tensors that it reads,
writes and saves. Its kernels belong to a fused implementation (flash attention, fused norms and
activations, a loss over slices of the tokens, one AdamW kernel per parameter). Nothing is measured: a kernel
takes --overhead plus the larger of its operations / --flop-rate and its bytes / --memory-bandwidth."""

EPILOG = """\
models:
  {models}

examples:
  teraio profile synth llama-3.1-8b --batch 4 -o 8b.profile.json.gz
  teraio profile synth llama-3.1-70b --batch 1 --micro-batches 8 --checkpoint -o 70b.profile.json.gz
  teraio profile synth gpt2 --batch 16 --flop-rate 80T --memory-bandwidth 800GB/s -o gpt2.profile.json

The defaults are for a H100: 400 TFLOP/s, 2640 GB/s, 4 us from one launch to the next. For a RTX 4090 give
--flop-rate 110T --memory-bandwidth 800GB/s; for an A100 give 180T and 1600GB/s."""

_FLOPS = re.compile(r"([0-9]{1,9})\s*([TP]?)(?:FLOP/?s?)?", re.ASCII | re.IGNORECASE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # This import is cheap: it loads neither torch nor numpy.
    from teraio.passes.synth.models import MODELS

    parser.description, parser.epilog = WHOLE, WHOLE_EPILOG
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    command = commands.add_parser(
        "show",
        help="show a profile and the tensors at its peak",
        description="Counts the kernels and tensors of a profile, and prints the bytes of each kind at the "
        "peak.",
        epilog="example:\n  teraio profile show run.profile.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("profile_file", metavar="PROFILE", help=PROFILE)
    command.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    command.set_defaults(run=show_profile)
    command = commands.add_parser(
        "list",
        help="list the profiles that come with teraio, and the models of `synth`",
        description="Lists the profiles that come with teraio, and the models of `teraio profile synth`.",
        epilog="example:\n  teraio profile list",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=list_profiles)
    _add_synth_arguments(
        commands.add_parser(
            "synth",
            help="make the profile of a well-known model, by roofline",
            description=DESCRIPTION,
            epilog=EPILOG.format(models=", ".join(MODELS)),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )


def _add_synth_arguments(command: argparse.ArgumentParser) -> None:
    from teraio.passes.synth import profiles

    default = profiles.ProfileRequest()
    command.add_argument("model", metavar="MODEL", help="one of the models below")
    command.add_argument("-o", "--output", required=True, metavar="FILE", help="compressed if it ends in .gz")
    command.add_argument("--batch", type=int, default=1, metavar="N", help="sequences in a micro-batch (1)")
    command.add_argument(
        "--sequence", type=int, default=0, metavar="N", help="tokens in a sequence (the model's own)"
    )
    command.add_argument(
        "--micro-batches", type=int, default=1, metavar="N", help="micro-batches in a step (1)"
    )
    command.add_argument(
        "--layers", type=int, default=0, metavar="N", help="number of layers (the model's own)"
    )
    command.add_argument(
        "--precision",
        default=default.precision,
        metavar="X",
        help="bf16-mixed: bf16 weights and gradients, fp32 master copies and moments (default); bf16: no "
        "master copies, bf16 moments; fp32",
    )
    command.add_argument(
        "--checkpoint", action="store_true", help="save only each layer's input, run the layer twice"
    )
    command.add_argument("--clip", action="store_true", help="clip gradients by norm before the optimizer")
    command.add_argument(
        "--frozen", action="store_true", help="train no weight, as in LoRA; the adapters are left out"
    )
    command.add_argument(
        "--loss-chunks",
        type=int,
        default=default.loss_chunks,
        metavar="N",
        help=f"slices in which head and loss are computed ({default.loss_chunks})",
    )
    command.add_argument("--flop-rate", default="400T", metavar="X", help="operations per second (400T)")
    command.add_argument(
        "--memory-bandwidth", default="2640GB/s", metavar="X", help="rate of device memory (2640GB/s)"
    )
    command.add_argument("--overhead", default="4us", metavar="X", help="time of each launch (4us)")
    command.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    command.set_defaults(run=synthesize_profile)


def show_profile(args: argparse.Namespace) -> int:
    from teraio.passes.planner.simulate.simulate import device_bytes_by_kind

    profile = read_or_synthesize_profile(args.profile_file)
    rows = device_bytes_by_kind(Plan("", "", 0), profile)
    live = [sum(column) for column in zip(*rows.values())] or [0]
    peak = max(range(len(live)), key=live.__getitem__)
    totals = {kind: [t for t in profile.tensors if t.kind == kind] for kind in get_args(Kind)}
    figures = {
        kind: {
            "tensors": len(tensors),
            "bytes": sum(t.size_bytes for t in tensors),
            "at_peak_bytes": rows[kind][peak] if rows.get(kind) else 0,
        }
        for kind, tensors in totals.items()
        if tensors
    }
    summary = _profile_figures(profile)
    if args.json:
        print(json.dumps({**summary, "peak_tick": peak, "kinds": figures}))
        return 0
    name = profile.kernels[peak].name if profile.kernels else "(no kernels)"
    print(_describe_profile(profile, summary))
    print(f"  peak at kernel {name} (tick {peak}), if nothing moves:")
    lines = [("kind", "tensors", "bytes in the step", "at the peak")]
    for kind, row in figures.items():
        lines.append((kind, f"{row['tensors']}", fmt_bytes(row["bytes"]), fmt_bytes(row["at_peak_bytes"])))
    print(table_for_stdout(lines))
    return 0


def list_profiles(args: argparse.Namespace) -> int:
    """Print a row for each shipped profile, and a row for each model of `teraio profile synth`."""
    from teraio.passes.synth.models import MODELS

    about = {name: shipped_files.ABOUT_PROFILES[name] for name in shipped_files.PROFILES.names()}
    if args.json:
        entries = [
            {"name": name, "path": str(shipped_files.PROFILES.path_of(name)), **asdict(each)}
            for name, each in about.items()
        ]
        models = [{"name": name, "parameters": count} for name, (_, count) in MODELS.items()]
        print(json.dumps({"profiles": entries, "models": models}))
        return 0
    rows: list[tuple[str, ...]] = [("profile", "what it is", "compute", "if nothing moves", "at least")]
    for name, each in about.items():
        sizes = fmt_bytes(each.peak_bytes), fmt_bytes(each.smallest_bytes, up=True)
        rows.append((name, each.what, fmt_ns(each.compute_ns), *sizes))
    print(table_for_stdout(rows, left=2))
    fold = terminal_of(sys.stdout).fold
    print(
        fold("by roofline: one step on a H100, in bf16 unless stated otherwise; llama-cpu-160MiB is measured")
    )
    rows = [("model", "parameters")]
    rows += [(name, f"{count / 1e9:.2f} billion") for name, (_, count) in MODELS.items()]
    print(table_for_stdout(rows))
    print(fold("a model's name means a step of one sequence; `teraio profile synth` makes other steps"))
    return 0


def _profile_figures(profile: Profile) -> dict[str, int | str]:
    from teraio.passes.planner.problem.problem import build_problem

    problem = build_problem(profile)
    return {
        "name": profile.name,
        "kernels": len(profile.kernels),
        "tensors": len(profile.tensors),
        "compute_ns": profile.compute_ns,
        "peak_bytes": int(problem.live.max()),
        "smallest_bytes": int(problem.floor.max()),
    }


def _describe_profile(profile: Profile, summary: dict[str, int | str]) -> str:
    return (
        f"{profile.name}: {fmt_count(len(profile.kernels), 'kernel')}, "
        f"{fmt_count(len(profile.tensors), 'tensor')}; "
        f"{fmt_ns(int(summary['compute_ns']))} of compute per step; "
        f"{fmt_bytes(int(summary['peak_bytes']))} if nothing moves, at least "
        f"{fmt_bytes(int(summary['smallest_bytes']), up=True)}"
    )


def synthesize_profile(args: argparse.Namespace) -> int:
    from teraio.passes.synth import profiles

    request = profiles.ProfileRequest(
        batch=args.batch,
        sequence=args.sequence,
        micro_batches=args.micro_batches,
        layers=args.layers,
        precision=args.precision,
        checkpoint=args.checkpoint,
        loss_chunks=args.loss_chunks,
        clip=args.clip,
        frozen=args.frozen,
        rates=_parse_rates(args),
    )
    profile = profiles.synth(args.model, request)
    profile.write(args.output)
    if args.json:
        parameters = profiles.count_parameters(profile, args.precision)
        print(json.dumps({**_profile_figures(profile), "parameters": parameters}))
        return 0
    print(
        f"{profiles.count_parameters(profile, args.precision):,} parameters in "
        f"{_describe_profile(profile, _profile_figures(profile))}"
    )
    return 0


def _parse_rates(args: argparse.Namespace) -> Rates:
    from teraio.passes.synth.roofline import Rates

    try:
        bandwidth, overhead_ns = parse_rate(args.memory_bandwidth), parse_ns(args.overhead)
    except ValueError as error:
        raise OptionError(f"--memory-bandwidth, --overhead: {error}") from None
    match = _FLOPS.fullmatch(args.flop_rate.strip())
    flop = int(match[1]) * {"": 1, "T": 10**12, "P": 10**15}[match[2].upper()] if match else 0
    if not 1 <= flop < 10**21:
        given = printable_line(args.flop_rate)
        raise OptionError(f"--flop-rate '{given}' is not a number of operations per second such as 400T")
    if not bandwidth or overhead_ns * 2**22 >= LIMIT:
        raise OptionError("--memory-bandwidth must be above 0, and --overhead below 2 ms")
    return Rates(flop, bandwidth, overhead_ns)
