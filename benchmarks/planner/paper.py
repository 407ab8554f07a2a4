"""A simulation of the TERAIO paper's models on the paper's machine. It gives the fraction of the ideal speed,
beside the published fraction.

    python benchmarks/planner/paper.py [--parts table wrong wrong-h100] [--models NAME ...] [--cpu] [-o FILE]

paper.toml lists all assumptions, and marks the ones from the paper.

table         each model without a host tier (`ssd`) and with one (`mixed`), planned by `auto` and by the
              paper's own greedy (passes/planner/published/teraio_paper.py), also for each band of bandwidth
              and FLOP rate
wrong         plans made from wrong kernel times, and simulated with the true kernel times; each wrong time
              is off by at most a share (`share` in paper.toml)
wrong-h100    the same as `wrong`, for Llama-3.1-8B with batch 16, within 80 GB on h100-8ssd-nohost

The benchmark measures no system and repeats none of the paper's runs. Kernel times come from a roofline
model. The script skips cases that FILE already contains. At the end it prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import cpu_clock
from kept_rows import KeptRows

from teraio.errors import PlanError
from teraio.formats.machine import Link, Machine, Tier
from teraio.formats.plan import Plan
from teraio.formats.plan_check import check_plan_against_profile
from teraio.formats.profile import Profile
from teraio.passes.planner import planners
from teraio.passes.planner.problem.problem import build_problem
from teraio.passes.planner.simulate.simulate import step_ns
from teraio.passes.synth import profiles, roofline
from teraio.passes.synth.models import MODELS, Decoder

GIVEN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
PAPER, OURS = GIVEN["from_the_paper"], GIVEN["ours"]
# IBM's published configuration of Granite-8B-code-base, without the biases. Biases are less than a thousandth
# of the parameters.
GRANITE = Decoder(49152, 4096, 36, 32, 8, 128, 14336, tied=True), 8_053_000_000
PROFILES = Path(__file__).resolve().parents[2] / "profiles"
H100 = (
    PROFILES / "llama-3.1-8b-b16.profile.json.gz",
    PROFILES / "machines" / "h100-8ssd-nohost.machine.json",
)
TIERS = ("ssd", "mixed")
OF_IDEAL = ("of_ideal", "bound_of_ideal")
PARTS = ["table", "wrong", "wrong-h100"]
KEY = ("part", "model", "tiers", "ssd_bytes_per_s", "flops_per_s", "planner", "seed")


def profile_of(name: str, flops_per_s: int) -> Profile:
    """Return the profile of one step of one pipeline stage."""
    model = GIVEN["models"][name]
    MODELS.setdefault("granite-8b-code", GRANITE)
    request = profiles.ProfileRequest(
        batch=PAPER["batch"] // model["micro_batches"],
        sequence=model["sequence"],
        micro_batches=model["micro_batches"],
        layers=model["layers"],
        precision=PAPER["precision"],
        rates=roofline.Rates(flops_per_s, OURS["memory_bytes_per_s"]),
    )
    return profiles.synth(model["decoder"], request)


def machine_of(name: str, tiers: str, ssd_bytes_per_s: int) -> Machine:
    """Return a machine with one GPU, and with this GPU's share of drives and host memory."""
    up, down = "pcie_up", "pcie_down"
    found = [Tier("device", PAPER["device_bytes"]), Tier("ssd", OURS["ssd_bytes"])]
    links = [
        Link("device", "ssd", ssd_bytes_per_s, OURS["ssd_write_latency_ns"], up),
        Link("ssd", "device", ssd_bytes_per_s, OURS["ssd_read_latency_ns"], down),
    ]
    pcie = OURS["pcie_bytes_per_s"]
    if tiers == "mixed":
        found.append(Tier("host", GIVEN["host_bytes_of_all_gpus"][name] // PAPER["gpus"]))
        links += [Link("device", "host", pcie, 0, up), Link("host", "device", pcie, 0, down)]
    return Machine("paper", tuple(found), tuple(links), ((up, pcie), (down, pcie)))


def took_ns(plan: Plan, profile: Profile, machine: Machine) -> int:
    verdict = check_plan_against_profile(plan, profile, machine)
    assert verdict.feasible, verdict.problems[0]
    return step_ns(plan, profile, machine)


def planned(profile: Profile, machine: Machine, name: str, limit_s: float) -> dict[str, Any]:
    began, began_cpu = time.monotonic(), time.process_time()
    try:
        if name == "auto":
            plan = planners.plan(profile, machine, PAPER["device_bytes"], time_limit_s=limit_s)
        else:
            problem = build_problem(profile, machine)
            make = planners.PLANNERS[name]
            plan = make(problem, machine, PAPER["device_bytes"], bound_ns=0, seed=0, time_limit_s=3600.0)
    except PlanError as error:
        return {"refused": str(error)}
    took = time.monotonic() - began, time.process_time() - began_cpu
    step = took_ns(plan, profile, machine)
    found = {"step_ns": step, "ideal_ns": profile.compute_ns, "of_ideal": round(profile.compute_ns / step, 4)}
    if name == "auto":
        found["bound_ns"] = plan.predicted.bound_ns
        found["bound_of_ideal"] = round(profile.compute_ns / plan.predicted.bound_ns, 4)
    return found | {"kernels": len(profile.kernels), "wall_s": round(took[0], 1), "cpu_s": round(took[1], 1)}


def perturbed(profile: Profile, seed: int) -> Profile:
    """Return the profile with random errors in the kernel times, like the report of an inaccurate
    profiler.
    """
    share, random = GIVEN["wrong_kernel_times"]["share"], Random(seed)
    kernels = tuple(
        replace(kernel, duration_ns=round(kernel.duration_ns * (1 + random.uniform(-share, share))))
        for kernel in profile.kernels
    )
    return replace(profile, kernels=kernels)


def misled(profile: Profile, machine: Machine, budget: int, seed: int, limit_s: float) -> dict[str, Any]:
    """Plan with wrong kernel times, and return the plan's step time with the true kernel times."""
    wrong = perturbed(profile, seed) if seed >= 0 else profile
    plan = planners.plan(wrong, machine, budget, time_limit_s=limit_s)
    step = took_ns(plan, profile, machine)
    return {
        "step_ns": step,
        "ideal_ns": profile.compute_ns,
        "of_ideal": round(profile.compute_ns / step, 4),
    }


def cases(parts: list[str], models: list[str]) -> list[tuple[Any, ...]]:
    ssd, flops, bands = PAPER["ssd_bytes_per_s"], OURS["flops_per_s"], GIVEN["bands"]
    rates = [(ssd, flops)]
    rates += [(each, flops) for each in bands["ssd_bytes_per_s"]]
    rates += [(ssd, each) for each in bands["flops_per_s"]]
    found: list[tuple[Any, ...]] = []
    if "table" in parts:
        steps = [(model, tiers) for model in models for tiers in TIERS]
        found += [("table", *step, *rates[0], name, 0) for name in ("auto", "teraio-paper") for step in steps]
        found += [("table", *step, *each, "auto", 0) for step in steps for each in rates[1:]]
    if "wrong" in parts:
        seeds = [-1, *GIVEN["wrong_kernel_times"]["seeds"]]
        hard = bands["flops_per_s"][1]  # with this FLOP rate, steps wait the most for transfers
        found += [("wrong", m, "mixed", ssd, hard, "auto", seed) for m in models for seed in seeds]
    if "wrong-h100" in parts:
        seeds = [-1, *GIVEN["wrong_kernel_times"]["seeds"]]
        found += [("wrong-h100", "llama-3.1-8b-b16", "ssd", 0, 0, "auto", seed) for seed in seeds]
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| part | model | tiers | SSD GB/s | TFLOP/s | planner | seed | of ideal | bound | wall s |"]
    lines.append("|---" * 10 + "|")
    for row in rows:
        rates = [f"{row['ssd_bytes_per_s'] / 1e9:.0f}", f"{row['flops_per_s'] / 1e12:.0f}"]
        cells = [row["part"], row["model"], row["tiers"], *rates, row["planner"], str(row["seed"])]
        cells += [f"{100 * row[each]:.1f} %" if each in row else "-" for each in OF_IDEAL]
        lines.append("| " + " | ".join([*cells, str(row.get("wall_s", "-"))]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", choices=list(GIVEN["models"]), default=list(GIVEN["models"]))
    parser.add_argument("--cpu", action="store_true", help="time limits in seconds of CPU")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.cpu:
        cpu_clock.use()
    kept = KeptRows(args.output, "planner_paper", KEY)
    for case in cases(args.parts, args.models):
        if case in kept.known:
            continue
        part, name, tiers, ssd, flops, planner_name, seed = case
        if part == "wrong-h100":
            found = misled(Profile.read(H100[0]), Machine.read(H100[1]), 80 * 10**9, seed, 10.0)
        else:
            profile, machine = profile_of(name, flops), machine_of(name, tiers, ssd)
            limit_s = GIVEN["models"][name]["plan_s"]
            if part == "table":
                found = planned(profile, machine, planner_name, limit_s)
            else:
                found = misled(profile, machine, PAPER["device_bytes"], seed, limit_s)
        kept.add(case, found)
    print(table(kept.rows))


if __name__ == "__main__":
    main()
