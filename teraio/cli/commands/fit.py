"""`teraio fit`: the smallest budget for a step, or the largest step for a machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass

from teraio.errors import OptionError, PlanError
from teraio.progress import show_stage
from teraio.text_table import table_for_stdout
from teraio.units import fmt_bytes, fmt_ns, printable_line

from .plan_request import (
    PROFILE,
    PlanRequest,
    request_from_arguments,
    request_with_budget,
    tier_capacity_bytes,
)
from .plan_request import add_arguments as add_common

DESCRIPTION = """\
With one profile: finds the smallest budget that has a plan, and the smallest at which the step takes at most
--within times its compute. The search halves the span between the smallest budget and the one at which
nothing moves, --probes times. Every printed figure comes from a plan that was made, checked and simulated.

With several profiles (of the same model with growing batches): plans each with --memory, and marks the
largest step that takes at most --within times its compute."""

EPILOG = """\
examples:
  teraio fit run.profile.json --machine rtx4090-1ssd --within 1.2
  teraio fit b1.profile.json b4.profile.json b16.profile.json --machine h100-4ssd --memory 60GiB

exit codes: 0 something fits, 1 nothing fits, 2 bad input"""

PROBES = 7  # budgets tried after the first two; each halves the range, so 1/128 of it remains


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("profile_files", nargs="+", metavar="PROFILE", help=PROFILE)
    add_common(parser, "memory", "planner", "plan_time", "keep")
    parser.add_argument(
        "--within", default="1.1", metavar="X", help="most time of a step, as a multiple of its compute (1.1)"
    )
    parser.add_argument("--probes", type=int, default=PROBES, metavar="N", help=f"budgets tried ({PROBES})")


@dataclass(frozen=True, slots=True)
class BudgetTrial:
    """One attempt to plan one profile within one budget. If it gave no predicted step, `step_ns` is None and
    `why` is the reason.
    """

    name: str
    memory_bytes: int
    floor_bytes: int
    compute_ns: int
    step_ns: int | None
    why: str = ""

    def is_within_factor(self, permille: int) -> bool:
        return self.step_ns is not None and self.step_ns * 1000 <= self.compute_ns * permille


def main(args: argparse.Namespace) -> int:
    permille = _parse_within_permille(args.within)
    if not 0 <= args.probes <= 64:
        raise OptionError(f"--probes is {args.probes}; give 0 to 64")
    if len(args.profile_files) > 1:
        return _print_largest_fitting_profile(args, permille)
    request = request_from_arguments(args, args.profile_files[0])
    most = (
        min(tier_capacity_bytes(request.machine), request.budget_bytes)
        if args.memory
        else tier_capacity_bytes(request.machine)
    )
    with show_stage("teraio fit"):
        fits = list(_try_budgets_by_halving(request, most, args.probes, permille))
    enough = min(
        (fit for fit in fits if fit.is_within_factor(permille)), key=lambda f: f.memory_bytes, default=None
    )
    if args.json:
        print(
            json.dumps(
                {
                    "smallest_bytes": request.floor_bytes,
                    "within_bytes": enough.memory_bytes if enough else None,
                    "fits": [_trial_as_dict(fit) for fit in fits],
                }
            )
        )
    else:
        print(_text_of_one_profile(request, fits, enough, permille))
    return 0 if any(fit.step_ns is not None for fit in fits) else 1


def _parse_within_permille(text: str) -> int:
    try:
        value = round(float(text) * 1000)
    except (ValueError, OverflowError):
        value = 0
    if not 1000 <= value <= 10**9:
        raise OptionError(f"--within '{printable_line(text)}' is not a factor of 1 or more, such as 1.2")
    return value


def _try_budgets_by_halving(
    request: PlanRequest, most_bytes: int, probes: int, permille: int
) -> Iterator[BudgetTrial]:
    """Try to plan within several budgets, and yield each trial.

    The order is: (1) the smallest budget, (2) the largest budget, (3) the middle of the remaining range of
    budgets, again and again. The search assumes that a smaller budget never gives a faster step. If this
    assumption is false, the search may miss the best budget, but each trial is still correct.
    """
    from teraio.passes.planner.problem.problem import build_problem

    all_bytes = min(int(build_problem(request.profile).live.max()), most_bytes)
    low, high = request.floor_bytes, all_bytes

    def try_budget_showing_progress(number: int, budget_bytes: int) -> BudgetTrial:
        with show_stage(f"plan {number} of up to {probes + 2}, within {fmt_bytes(budget_bytes, up=True)}"):
            return _try_budget(request, budget_bytes)

    yield (floor := try_budget_showing_progress(1, low))
    if high <= low or floor.is_within_factor(permille):
        return
    yield (top := try_budget_showing_progress(2, high))
    for number in range(probes if top.is_within_factor(permille) else 0):
        middle = (low + high) // 2
        if middle in (low, high):
            return
        fit = try_budget_showing_progress(number + 3, middle)
        yield fit
        low, high = (low, middle) if fit.is_within_factor(permille) else (middle, high)


def _try_budget(request: PlanRequest, budget_bytes: int) -> BudgetTrial:
    compute = request.profile.compute_ns
    name, floor = request.profile.name, request.floor_bytes
    try:
        plan, _ = request_with_budget(request, budget_bytes).make_plan()
    except PlanError as error:
        return BudgetTrial(name, budget_bytes, floor, compute, None, str(error))
    step = plan.predicted.step_ns
    if not step:
        return BudgetTrial(
            name, budget_bytes, floor, compute, None, f"planner {request.planner!r} predicts no step"
        )
    return BudgetTrial(name, budget_bytes, floor, compute, step)


def _print_largest_fitting_profile(args: argparse.Namespace, permille: int) -> int:
    fits = []
    with show_stage("teraio fit"):
        for number, path in enumerate(args.profile_files, 1):
            with show_stage(f"profile {number} of {len(args.profile_files)}"):
                request = request_from_arguments(args, path)
                fits.append(_try_budget(request, request.budget_bytes))
    best = max(
        (fit for fit in fits if fit.is_within_factor(permille)), key=lambda f: f.compute_ns, default=None
    )
    if args.json:
        rows = [{**_trial_as_dict(fit), "within": fit.is_within_factor(permille)} for fit in fits]
        print(json.dumps({"best": best.name if best else None, "fits": rows}))
    else:
        print(_text_of_several_profiles(fits, best, permille))
    return 0 if any(fit.step_ns is not None for fit in fits) else 1


def _trial_as_dict(fit: BudgetTrial) -> dict[str, object]:
    return {
        "name": fit.name,
        "memory_bytes": fit.memory_bytes,
        "smallest_bytes": fit.floor_bytes,
        "compute_ns": fit.compute_ns,
        "step_ns": fit.step_ns,
        "why": fit.why,
    }


def _format_slowdown(fit: BudgetTrial) -> str:
    return f"{(fit.step_ns or 0) / max(fit.compute_ns, 1):.2f}x" if fit.step_ns is not None else "-"


def _text_of_one_profile(
    request: PlanRequest, fits: list[BudgetTrial], enough: BudgetTrial | None, permille: int
) -> str:
    rows: list[tuple[str, ...]] = [("memory", "step", "of compute")]
    rows += [
        (
            f"{'*' if fit is enough else ' '} {fmt_bytes(fit.memory_bytes, up=True)}",
            fmt_ns(fit.step_ns) if fit.step_ns is not None else "no plan",
            _format_slowdown(fit),
        )
        for fit in sorted(fits, key=lambda fit: fit.memory_bytes)
    ]
    verdict = (
        f"{fmt_bytes(enough.memory_bytes, up=True)} keep the step within {permille / 1000:g}x"
        if enough
        else f"no tried budget keeps the step within {permille / 1000:g}x"
    )
    why = [f"  {fit.why}" for fit in fits if fit.why][:1]
    return "\n".join(
        [
            f"{request.profile.name} on {request.machine.name}: at least "
            f"{fmt_bytes(request.floor_bytes, up=True)} ({request.floor_bytes} bytes), compute alone "
            f"{fmt_ns(fits[0].compute_ns)}; {verdict}",
            table_for_stdout(rows),
            *why,
        ]
    )


def _text_of_several_profiles(fits: list[BudgetTrial], best: BudgetTrial | None, permille: int) -> str:
    rows: list[tuple[str, ...]] = [("profile", "needs at least", "memory", "compute", "step", "of compute")]
    rows += [
        (
            f"{'*' if fit is best else ' '} {fit.name}",
            fmt_bytes(fit.floor_bytes, up=True),
            fmt_bytes(fit.memory_bytes),
            fmt_ns(fit.compute_ns),
            fmt_ns(fit.step_ns) if fit.step_ns is not None else "no plan",
            _format_slowdown(fit),
        )
        for fit in fits
    ]
    if best:
        verdict = (
            f"{best.name} is the largest step that fits and takes at most {permille / 1000:g}x of compute"
        )
    else:
        verdict = f"none of these steps fits and takes at most {permille / 1000:g}x of compute"
    return "\n".join(
        [verdict, table_for_stdout(rows), *(f"  {fit.name}: {fit.why}" for fit in fits if fit.why)]
    )
