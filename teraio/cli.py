"""The command line. Every error is one line that ends with the remedy; exit code 2 for bad input."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from teraio import __version__, demo, doctor, options
from teraio.cache import fingerprint_of
from teraio.errors import FileFormatError, OptionError, TeraioError
from teraio.machine import Machine
from teraio.plan import Evict, Plan
from teraio.profile import Profile
from teraio.units import fmt_bytes, fmt_ns


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        return int(args.run(args))
    except (FileFormatError, OptionError) as error:
        print(f"teraio: {error}", file=sys.stderr)
        return 2
    except TeraioError as error:
        print(f"teraio: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="teraio", description="Train models that do not fit.")
    parser.add_argument("--version", action="version", version=f"teraio {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("demo", help="train a small Llama plainly and within half of its memory")
    demo.add_arguments(command)
    command.set_defaults(run=demo.main)

    command = commands.add_parser(
        "plan", help="make a plan from a saved profile, for a machine one may not own"
    )
    command.add_argument("profile", help="a profile: options={'profile': 'run.profile.json'} writes one")
    command.add_argument(
        "--machine", required=True, help="a machine file: `teraio doctor -o` writes this machine's"
    )
    options.add_flags(command, ["memory", "planner", "plan_time", "keep"])
    command.add_argument("-o", "--output", help="write the plan to this file")
    command.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    command.set_defaults(run=_plan)

    command = commands.add_parser("simulate", help="predict the step of a plan and write its timeline")
    command.add_argument("plan")
    command.add_argument("profile_file", metavar="profile")
    command.add_argument("--machine", required=True)
    command.add_argument("-o", "--output", help="write the predicted timeline to this file")
    command.set_defaults(run=_simulate)

    command = commands.add_parser(
        "doctor", help="what this machine can do, what stands in the way, and the fix"
    )
    doctor.add_arguments(command)
    command.set_defaults(run=doctor.main)

    command = commands.add_parser("store", help="list or clear what dead processes left in a store")
    command.add_argument("action", choices=("list", "clear"))
    command.add_argument("directory", nargs="*", help="default: where stores are made by default")
    command.set_defaults(run=_store)
    return parser


def _store(args: argparse.Namespace) -> int:
    from teraio.runtime import leftovers, store_places

    for directory in map(Path, args.directory) if args.directory else store_places.default_directories():
        found = leftovers.clear(directory) if args.action == "clear" else leftovers.leftovers(directory)
        print(f"{directory}: {len(found)} {'cleared' if args.action == 'clear' else 'found'}")
        for each in found:
            print(f"  {each.state:<8} process {each.pid:<8} {fmt_bytes(each.size_bytes):>10}  {each.path}")
    return 0


def _plan(args: argparse.Namespace) -> int:
    from teraio.passes import planner

    path, args.profile = args.profile, None
    asked = options.from_flags(args)
    profile, machine = Profile.read(path), Machine.read(args.machine)
    floor = planner.smallest_budget(profile, _kept(profile, asked.keep))
    capacity = next((tier.capacity_bytes for tier in machine.tiers if tier.name == "device"), 0)
    budget = asked.memory.resolve(capacity, floor) if asked.memory else capacity
    began = time.monotonic_ns()
    plan = planner.plan(
        profile,
        machine,
        budget,
        planner=asked.planner,
        fingerprint=fingerprint_of(profile),
        time_limit_s=asked.plan_time / 1e9,
        keep=_kept(profile, asked.keep),
    )
    plan_ns = time.monotonic_ns() - began
    if args.output:
        plan.write(args.output)
    print(_figures(plan, profile, plan_ns, as_json=args.json))
    return 0


def _kept(profile: Profile, globs: Sequence[str]) -> frozenset[str]:
    from fnmatch import fnmatchcase

    return frozenset(t.name for t in profile.tensors if any(fnmatchcase(t.name, glob) for glob in globs))


def _figures(plan: Plan, profile: Profile, plan_ns: int, *, as_json: bool) -> str:
    sizes = {tensor.name: tensor.size_bytes for tensor in profile.tensors}
    written = [
        m for m in plan.moves if isinstance(m, Evict) and m.to.startswith("ssd") and m.trigger is not None
    ]
    write_bytes = sum(sizes[move.tensor] for move in written)
    compute_ns = sum(kernel.duration_ns for kernel in profile.kernels)
    figures = {
        "step_ns": plan.predicted.step_ns,
        "compute_ns": compute_ns,
        "bound_ns": plan.predicted.bound_ns,
        "peak_bytes": plan.predicted.peak_bytes,
        "memory_bytes": plan.budget_bytes,
        "plan_ns": plan_ns,
        "planner": plan.planner,
        "ssd_write_bytes": write_bytes,
        "moves": len(plan.moves),
        "feasible": True,
    }
    if as_json:
        return json.dumps(figures)
    step, bound = plan.predicted.step_ns, plan.predicted.bound_ns
    return (
        f"{len(plan.moves)} moves by {plan.planner} in {fmt_ns(plan_ns)}: a step of {fmt_ns(step)}, "
        f"{step / max(bound, 1) - 1:.1%} above the bound {fmt_ns(bound)} for this profile "
        f"(compute alone {fmt_ns(compute_ns)}); peak {fmt_bytes(plan.predicted.peak_bytes)} "
        f"of {fmt_bytes(plan.budget_bytes)}; {fmt_bytes(write_bytes)} written to SSD per step"
    )


def _simulate(args: argparse.Namespace) -> int:
    from teraio.passes.planner.simulate import simulate, step_ns

    plan, profile, machine = Plan.read(args.plan), Profile.read(args.profile_file), Machine.read(args.machine)
    if args.output:
        simulate(plan, profile, machine).write(args.output)
    print(f"a step of {fmt_ns(step_ns(plan, profile, machine))}")
    return 0
