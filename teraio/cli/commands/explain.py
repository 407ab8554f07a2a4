"""`teraio explain`: the waits of a step with their causes, and changes that would make the step faster.

The table of links has the busy time of each link. The table of waits has the tensors that compute waited for.
The what-if table has a new prediction of the step for each of these machines:

    the machine as it is, the machine with one more drive, with more host memory, with more device memory
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from teraio import options
from teraio.errors import TeraioError
from teraio.formats.machine import Link, Machine, Tier
from teraio.formats.plan import Plan, moved_bytes_by_kind
from teraio.formats.planned_step import apply_plan_changes
from teraio.formats.profile import Profile
from teraio.formats.timeline import Timeline
from teraio.formats.updates import profile_with_updates
from teraio.progress import show_stage
from teraio.text_table import table_for_stdout
from teraio.units import fmt_bytes, fmt_count, fmt_ns, fmt_rate

from . import step_listing
from .plan import parse_endurance_bytes
from .plan_figures import figures_of_plan, time_and_bytes_by_lane
from .plan_request import (
    PlanRequest,
    add_plan_arguments,
    add_what_if_argument,
    read_checked_plan,
    read_profile_and_machine,
)

DESCRIPTION = """\
Simulates a plan and prints where the time of its step is spent: how long every link is busy, which tensors
compute waits for and why, which bytes move, and how long the drives last. Then it plans the same step again:
on the same machine, and with one more drive, more host memory or more device memory. With --graph it prints
the acts of the plan, kernel by kernel."""

EPILOG = """\
Causes of waiting: `late read` is a fetch that began too late to end in time, because there was no room
earlier. `link busy` is a transfer that queued behind others, or an eviction whose memory was needed before
its end.

The added drive reads 7 and writes 5 GB/s (PCIe 4.0), within the bandwidth that links share. Host memory that
is added to a machine without any has the bandwidth that the drives share, or 25 GB/s.

examples:
  teraio explain run.plan.json run.profile.json --machine h100-4ssd
  teraio explain run.plan.json run.profile.json --machine h100-4ssd --graph"""

MORE_HOST_BYTES = 64 * 2**30
MORE_DEVICE_BYTES = 8 * 2**30
DRIVE_READ, DRIVE_WRITE = 7 * 10**9, 5 * 10**9
HOST_RATE = 25 * 10**9  # bytes per second of PCIe 4.0 x16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_plan_arguments(parser)
    parser.add_argument("--top", type=int, default=8, metavar="N", help="tensors to list (8)")
    add_what_if_argument(parser)
    parser.add_argument("--endurance", default="", metavar="X", help="bytes the drives are rated for: 2400TB")
    options.add_flags(parser, ["plan_time"])
    parser.add_argument(
        "--graph",
        action="store_true",
        help="print the kernels of the step instead, with the moves that begin and end before each",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")


@dataclass(frozen=True, slots=True)
class TensorWaits:
    """The waits of compute for one tensor that have the same cause."""

    name: str
    ns: int
    times: int
    cause: str
    kernel: str  # the kernel before which compute waited longest


@dataclass(frozen=True, slots=True)
class WhatIfAnswer:
    """The predicted step for one change of the machine.

    If no plan exists, `step_ns` is None, and `why` is the reason. If only the bound (the lower bound of the
    step time) was computed, `step_ns` is None, too.
    """

    change: str
    bound_ns: int | None
    step_ns: int | None
    why: str = ""


def main(args: argparse.Namespace) -> int:
    from teraio.passes.planner.simulate.simulate import simulate, unshared_step_ns

    endurance = parse_endurance_bytes(args)
    profile, machine = read_profile_and_machine(args.profile_file, args.machine)
    made, whole = read_checked_plan(args.plan_file, profile, machine), profile
    plan, profile = apply_plan_changes(made, whole)
    if args.graph:
        print(
            json.dumps(step_listing.step_listing_as_dict(plan, profile))
            if args.json
            else step_listing.step_listing_as_text(plan, profile)
        )
        return 0
    line = simulate(plan, profile, machine)
    step = line.step_ns
    plan = replace(plan, predicted=replace(plan.predicted, step_ns=step))
    waits = list(waits_by_tensor(line, profile))
    limit_ns = options.settings_from_flags(args).plan_time
    answers = answer_what_if("teraio explain", made, whole, machine, args.what_if, limit_ns)
    if args.json:
        print(json.dumps(_explanation_as_dict(line, step, profile, plan, waits[: args.top], answers)))
        return 0
    print(_describe_step(line, step, profile, plan))
    if step != (unshared := unshared_step_ns(plan, profile, machine)):
        print(f"links share bandwidth; without sharing, a step of {fmt_ns(unshared)}")
    print(_links_table(line, step, machine))
    print(_moved_bytes_by_kind_table(plan, profile))
    if waits:
        print(_waits_table(waits, max(args.top, 0)))
    wear = figures_of_plan(plan, profile, machine, 0, endurance).describe_drive_wear()
    if wear:
        print(f"written to SSD: {wear.removeprefix(', ')}")
    if answers:
        print(_what_if_table(answers, step))
    return 0


def waits_by_tensor(line: Timeline, profile: Profile) -> Iterator[TensorWaits]:
    """Yield the sum of the waits for each pair of tensor and cause. The largest sum comes first."""
    sums: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for stall in line.stalls:
        sums.setdefault((stall.tensor, stall.cause), []).append((stall.ns, stall.tick))
    for (name, cause), stalls in sorted(
        sums.items(), key=lambda each: (-sum(s[0] for s in each[1]), each[0])
    ):
        tick = max(stalls)[1] % len(profile.kernels)
        yield TensorWaits(name, sum(ns for ns, _ in stalls), len(stalls), cause, profile.kernels[tick].name)


def _describe_step(line: Timeline, step: int, profile: Profile, plan: Plan) -> str:
    compute = profile.compute_ns
    causes = {
        cause: sum(stall.ns for stall in line.stalls if stall.cause == cause)
        for cause in sorted({stall.cause for stall in line.stalls})
    }
    causes_text = ", ".join(f"{fmt_ns(ns)} for {cause}" for cause, ns in causes.items()) or "no stalls"
    busiest = max(time_and_bytes_by_lane(line), key=lambda lane: lane[1], default=("", 0, 0))
    full = busiest[1] * 20 >= step * 19
    verdict = (
        f"{busiest[0]} is busy all the time: no order of moves helps, only fewer bytes on it or a faster link"
        if full
        else "no link is busy all the time: with more memory, or a better plan, tensors could move earlier"
    )
    return (
        f"a step of {fmt_ns(step)}: {fmt_ns(compute)} of compute and {fmt_ns(max(step - compute, 0))} of "
        f"waiting ({causes_text}), {fmt_count(len(plan.moves), 'move')}"
        + (f"\n{verdict}" if step > compute * 101 // 100 else "")
    )


def _links_table(line: Timeline, step: int, machine: Machine) -> str:
    rows: list[tuple[str, ...]] = [("link", "busy", "of the step", "carries", "rate", "shared with")]
    links = {
        (f"evict:{x.target}" if x.source == "device" else f"fetch:{x.source}"): x
        for x in machine.links
        if "device" in (x.source, x.target)
    }
    for track, ns, size in time_and_bytes_by_lane(line):
        link = links[track]
        shares = [name for name, other in links.items() if other.shares == link.shares and other is not link]
        rows.append(
            (
                track,
                fmt_ns(ns),
                f"{ns / max(step, 1):.0%}",
                fmt_bytes(size),
                fmt_rate(link.bandwidth_bytes_per_s),
                ", ".join(shares) if link.shares else "-",
            )
        )
    return table_for_stdout(rows) if len(rows) > 1 else "  nothing moves"


def _moved_bytes_by_kind_table(plan: Plan, profile: Profile) -> str:
    out, back = (
        moved_bytes_by_kind(plan, profile, "", evict=True),
        moved_bytes_by_kind(plan, profile, "", evict=False),
    )
    drops = sum(getattr(move, "trigger", 0) is None for move in plan.moves)
    rows: list[tuple[str, ...]] = [("kind", "written", "read")]
    rows += [
        (kind, fmt_bytes(out.get(kind, 0)), fmt_bytes(back.get(kind, 0))) for kind in sorted({*out, *back})
    ]
    return f"{table_for_stdout(rows)}\n  {fmt_count(drops, 'drop')} of clean copies, which cost no write"


def _waits_table(waits: list[TensorWaits], top: int) -> str:
    rows: list[tuple[str, ...]] = [("waited for", "time", "times", "cause", "most before kernel")]
    rows += [(w.name, fmt_ns(w.ns), str(w.times), w.cause, w.kernel) for w in waits[:top]]
    left = waits[top:]
    more = [(f"... and {len(left)} more", fmt_ns(sum(w.ns for w in left)), "", "", "")] if left else []
    return table_for_stdout([*rows, *more])


def _what_if_table(answers: list[WhatIfAnswer], step: int) -> str:
    return table_for_stdout(what_if_rows(answers, step))


def what_if_rows(answers: list[WhatIfAnswer], step: int) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("what if", "step", "against now", "bound")]
    for answer in answers:
        gain = f"{answer.step_ns / max(step, 1) - 1:+.1%}" if answer.step_ns else "-"
        rows.append(
            (
                answer.change,
                fmt_ns(answer.step_ns) if answer.step_ns else ("no plan" if answer.why else "-"),
                gain,
                fmt_ns(answer.bound_ns) if answer.bound_ns is not None else "-",
            )
        )
    return rows


def answer_what_if(
    command: str, plan: Plan, profile: Profile, machine: Machine, by: str, limit_ns: int
) -> list[WhatIfAnswer]:
    """Return the predicted step for each change of the machine. Show progress on stderr.

    `by` is the value of `--what-if`. If it is `off`, return an empty list.
    """
    if by == "off":
        return []
    with show_stage(command):
        return list(predict_each_change(plan, profile, machine, by, limit_ns))


def predict_each_change(
    plan: Plan, profile: Profile, machine: Machine, by: str, limit_ns: int
) -> Iterator[WhatIfAnswer]:
    """Yield the predicted step for each change of the machine.

    If `by` is `plan`, make a new plan for each changed machine. If `by` is `bound`, compute only the lower
    bound of the step time. `plan` is the plan as its file contains it. If `plan` recomputes tensors, the new
    plans may recompute tensors, too. Updates run at the same places as in `plan`.
    """
    from teraio.passes.planner import planners

    profile = profile_with_updates(profile, plan.late, plan.backward)
    recompute, limit_s = bool(plan.recompute), limit_ns / 1e9
    for change, other, budget in _machine_variants(machine, plan.budget_bytes):
        try:
            with show_stage(f"what if: {change}"):
                if by == "bound":
                    bound = planners.bound_ns(
                        profile, other, budget, time_limit_s=limit_s, recompute=recompute
                    )
                    answer = WhatIfAnswer(change, bound, None)
                else:
                    request = PlanRequest(profile, other, budget, 0, "auto", limit_ns, recompute=recompute)
                    made, _ = request.make_plan()
                    answer = WhatIfAnswer(change, made.predicted.bound_ns, made.predicted.step_ns)
        except TeraioError as error:
            answer = WhatIfAnswer(change, None, None, str(error))
        yield answer


def _machine_variants(machine: Machine, budget: int) -> Iterator[tuple[str, Machine, int]]:
    """Yield (name of the change, changed machine, changed budget). The first entry changes nothing."""
    yield "planned again", machine, budget
    if any(tier.name == "ssd" for tier in machine.tiers):
        yield "1 drive more", _machine_with_drive_added(machine), budget
    yield f"{fmt_bytes(MORE_HOST_BYTES)} more host memory", _machine_with_host_memory_added(machine), budget
    tiers = tuple(
        replace(t, capacity_bytes=t.capacity_bytes + MORE_DEVICE_BYTES) if t.name == "device" else t
        for t in machine.tiers
    )
    more = f"{fmt_bytes(MORE_DEVICE_BYTES)} more device memory"
    yield more, replace(machine, tiers=tiers), budget + MORE_DEVICE_BYTES


def _machine_with_drive_added(machine: Machine) -> Machine:
    shared = dict(machine.shared)

    def add_drive_rate(link: Link) -> Link:
        if "ssd" not in (link.source, link.target):
            return link
        rate = link.bandwidth_bytes_per_s + (DRIVE_READ if link.source == "ssd" else DRIVE_WRITE)
        most = shared.get(link.shares, rate) if link.shares else rate
        return replace(link, bandwidth_bytes_per_s=max(min(rate, most), link.bandwidth_bytes_per_s))

    return replace(machine, links=tuple(map(add_drive_rate, machine.links)))


def _machine_with_host_memory_added(machine: Machine) -> Machine:
    if any(tier.name == "host" for tier in machine.tiers):
        tiers = tuple(
            replace(t, capacity_bytes=t.capacity_bytes + MORE_HOST_BYTES) if t.name == "host" else t
            for t in machine.tiers
        )
        return replace(machine, tiers=tiers)
    shares_of = {(link.source, link.target): link.shares for link in machine.links}
    shared = dict(machine.shared)

    def make_host_link(source: str, target: str, like: tuple[str, str]) -> Link:
        shares = shares_of.get(like)
        return Link(source, target, shared[shares] if shares else HOST_RATE, 10_000, shares)

    links = (
        make_host_link("device", "host", ("device", "ssd")),
        make_host_link("host", "device", ("ssd", "device")),
    )
    host = Tier("host", MORE_HOST_BYTES)
    return replace(machine, tiers=(*machine.tiers, host), links=(*machine.links, *links))


def _explanation_as_dict(
    line: Timeline,
    step: int,
    profile: Profile,
    plan: Plan,
    waits: list[TensorWaits],
    answers: list[WhatIfAnswer],
) -> dict[str, object]:
    return {
        "step_ns": step,
        "compute_ns": profile.compute_ns,
        "stall_ns": sum(stall.ns for stall in line.stalls),
        "links": {track: {"busy_ns": ns, "bytes": size} for track, ns, size in time_and_bytes_by_lane(line)},
        "written_bytes": moved_bytes_by_kind(plan, profile, "", evict=True),
        "read_bytes": moved_bytes_by_kind(plan, profile, "", evict=False),
        "waits": [
            {"tensor": w.name, "ns": w.ns, "times": w.times, "cause": w.cause, "kernel": w.kernel}
            for w in waits
        ],
        "what_if": [
            {"change": a.change, "bound_ns": a.bound_ns, "step_ns": a.step_ns, "why": a.why} for a in answers
        ],
    }
