"""`teraio fit`: how little memory a step needs, or how large a step a machine can take."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass

from teraio.errors import OptionError, PlanError
from teraio.progress import stage
from teraio.text_table import table
from teraio.units import fmt_bytes, fmt_ns, shown

from .plan_request import PROFILE, Request, capacity, request, with_budget
from .plan_request import add_arguments as add_common

DESCRIPTION = """\
With one profile: the smallest budget there is a plan for, and the smallest at which the step takes at most
--within times compute alone. Budgets between the smallest and the one at which nothing moves are planned,
halving the span --probes times; every figure printed is that of a plan that was made, checked and simulated.

With several profiles (of the same model with growing batches): each is planned with --memory, and the largest
that fits and stays within --within of compute alone is marked."""

EPILOG = """\
examples:
  teraio fit run.profile.json --machine rtx4090-1ssd --within 1.2
  teraio fit b1.profile.json b4.profile.json b16.profile.json --machine h100-4ssd --memory 60GiB

exit codes: 0 something fits, 1 nothing does, 2 bad input"""

PROBES = 7  # each halves the span: 1/128 of it is left


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("profile_files", nargs="+", metavar="PROFILE", help=PROFILE)
    add_common(parser, "memory", "planner", "plan_time", "keep")
    parser.add_argument(
        "--within", default="1.1", metavar="X", help="how much longer than compute a step may take (1.1)"
    )
    parser.add_argument("--probes", type=int, default=PROBES, metavar="N", help=f"budgets tried ({PROBES})")


@dataclass(frozen=True, slots=True)
class Fit:
    """One budget for one profile. `step_ns` is None where there is no plan, and `why` says why."""

    name: str
    memory_bytes: int
    floor_bytes: int
    compute_ns: int
    step_ns: int | None
    why: str = ""

    def within(self, permille: int) -> bool:
        return self.step_ns is not None and self.step_ns * 1000 <= self.compute_ns * permille


def main(args: argparse.Namespace) -> int:
    permille = _permille(args.within)
    if not 0 <= args.probes <= 64:
        raise OptionError(f"--probes is {args.probes}; give 0 to 64")
    if len(args.profile_files) > 1:
        return _largest(args, permille)
    asked = request(args, args.profile_files[0])
    most = min(capacity(asked.machine), asked.budget_bytes) if args.memory else capacity(asked.machine)
    with stage("teraio fit"):
        fits = list(_smallest(asked, most, args.probes, permille))
    enough = min((fit for fit in fits if fit.within(permille)), key=lambda f: f.memory_bytes, default=None)
    if args.json:
        print(
            json.dumps(
                {
                    "smallest_bytes": asked.floor_bytes,
                    "within_bytes": enough.memory_bytes if enough else None,
                    "fits": [_as_json(fit) for fit in fits],
                }
            )
        )
    else:
        print(_one(asked, fits, enough, permille))
    return 0 if any(fit.step_ns is not None for fit in fits) else 1


def _permille(text: str) -> int:
    try:
        value = round(float(text) * 1000)
    except (ValueError, OverflowError):
        value = 0
    if not 1000 <= value <= 10**9:
        raise OptionError(f"--within '{shown(text)}' is not a factor of 1 or more, such as 1.2")
    return value


def _smallest(asked: Request, most_bytes: int, probes: int, permille: int) -> Iterator[Fit]:
    """The smallest budget, the largest, and what halving the span between them finds. The search takes the
    planner's word that less memory is not faster; what is printed is true where it is not, too."""
    from teraio.passes.planner.problem.problem import build

    all_bytes = min(int(build(asked.profile).live.max()), most_bytes)
    low, high = asked.floor_bytes, all_bytes

    def fitted(number: int, budget_bytes: int) -> Fit:
        with stage(f"plan {number} of up to {probes + 2}, within {fmt_bytes(budget_bytes, up=True)}"):
            return _fit(asked, budget_bytes)

    yield (floor := fitted(1, low))
    if high <= low or floor.within(permille):
        return
    yield (top := fitted(2, high))
    for number in range(probes if top.within(permille) else 0):
        middle = (low + high) // 2
        if middle in (low, high):
            return
        fit = fitted(number + 3, middle)
        yield fit
        low, high = (low, middle) if fit.within(permille) else (middle, high)


def _fit(asked: Request, budget_bytes: int) -> Fit:
    compute = asked.profile.compute_ns
    name, floor = asked.profile.name, asked.floor_bytes
    try:
        plan, _ = with_budget(asked, budget_bytes).made()
    except PlanError as error:
        return Fit(name, budget_bytes, floor, compute, None, str(error))
    step = plan.predicted.step_ns
    if not step:
        return Fit(name, budget_bytes, floor, compute, None, f"planner {asked.planner!r} predicts no step")
    return Fit(name, budget_bytes, floor, compute, step)


def _largest(args: argparse.Namespace, permille: int) -> int:
    fits = []
    with stage("teraio fit"):
        for number, path in enumerate(args.profile_files, 1):
            with stage(f"profile {number} of {len(args.profile_files)}"):
                asked = request(args, path)
                fits.append(_fit(asked, asked.budget_bytes))
    best = max((fit for fit in fits if fit.within(permille)), key=lambda f: f.compute_ns, default=None)
    if args.json:
        told = [{**_as_json(fit), "within": fit.within(permille)} for fit in fits]
        print(json.dumps({"best": best.name if best else None, "fits": told}))
    else:
        print(_several(fits, best, permille))
    return 0 if any(fit.step_ns is not None for fit in fits) else 1


def _as_json(fit: Fit) -> dict[str, object]:
    return {
        "name": fit.name,
        "memory_bytes": fit.memory_bytes,
        "smallest_bytes": fit.floor_bytes,
        "compute_ns": fit.compute_ns,
        "step_ns": fit.step_ns,
        "why": fit.why,
    }


def _ratio(fit: Fit) -> str:
    return f"{(fit.step_ns or 0) / max(fit.compute_ns, 1):.2f}x" if fit.step_ns is not None else "-"


def _one(asked: Request, fits: list[Fit], enough: Fit | None, permille: int) -> str:
    rows: list[tuple[str, ...]] = [("memory", "step", "of compute")]
    rows += [
        (
            f"{'*' if fit is enough else ' '} {fmt_bytes(fit.memory_bytes, up=True)}",
            fmt_ns(fit.step_ns) if fit.step_ns is not None else "no plan",
            _ratio(fit),
        )
        for fit in sorted(fits, key=lambda fit: fit.memory_bytes)
    ]
    told = (
        f"{fmt_bytes(enough.memory_bytes, up=True)} keep the step within {permille / 1000:g}x"
        if enough
        else f"no budget that was tried keeps the step within {permille / 1000:g}x"
    )
    why = [f"  {fit.why}" for fit in fits if fit.why][:1]
    return "\n".join(
        [
            f"{asked.profile.name} on {asked.machine.name}: at least "
            f"{fmt_bytes(asked.floor_bytes, up=True)} ({asked.floor_bytes} bytes), compute alone "
            f"{fmt_ns(fits[0].compute_ns)}; {told}",
            table(rows),
            *why,
        ]
    )


def _several(fits: list[Fit], best: Fit | None, permille: int) -> str:
    rows: list[tuple[str, ...]] = [("profile", "needs at least", "memory", "compute", "step", "of compute")]
    rows += [
        (
            f"{'*' if fit is best else ' '} {fit.name}",
            fmt_bytes(fit.floor_bytes, up=True),
            fmt_bytes(fit.memory_bytes),
            fmt_ns(fit.compute_ns),
            fmt_ns(fit.step_ns) if fit.step_ns is not None else "no plan",
            _ratio(fit),
        )
        for fit in fits
    ]
    if best:
        told = f"{best.name} is the largest step that fits and stays within {permille / 1000:g}x of compute"
    else:
        told = f"none of these fits and stays within {permille / 1000:g}x of compute"
    return "\n".join([told, table(rows), *(f"  {fit.name}: {fit.why}" for fit in fits if fit.why)])
