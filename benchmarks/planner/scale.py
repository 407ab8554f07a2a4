"""Simulated trainings larger than any available machine: Llama-70B on 1, 2 and 8 GPUs, and a model of 10^12
parameters on 8 GPUs.

    python benchmarks/planner/scale.py [--plan-time 60] [--cpu] [-o FILE]

Nothing was run on these machines. A step is a profile from a roofline model (`teraio profile synth`), cut in
equal parts. With G GPUs every kernel takes 1/G of its time and every tensor 1/G of its bytes (tensor and
sequence parallel). The output of each block also costs a ring all-reduce, in the forward and in the backward.
Every GPU has its own drives and its own PCIe link, so one plan holds for all GPUs. The class `Assumed` lists
the assumptions. The script prints them with the rows. With `--cpu` time limits are in CPU seconds, for a
machine with other load.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "versus"))

import cpu_clock
from race.result import RESULTS, Table, write

from teraio.errors import TeraioError
from teraio.formats.machine import Link, Machine, Tier
from teraio.formats.plan import moved_bytes_by_kind
from teraio.formats.planned_step import apply_plan_changes
from teraio.formats.profile import Profile
from teraio.passes.planner import planners
from teraio.passes.synth.models import MODELS, Decoder
from teraio.passes.synth.profiles import ProfileRequest, synth

GB = 10**9
REDUCED = re.compile(r"\.(wo|down|wq\.dgrad|gate\.dgrad)$")  # names of kernels that an all-reduce follows
DENSE_1T = Decoder(51200, 25600, 128, 160, 160, 160, 68352)


@dataclass(frozen=True, slots=True)
class Assumed:
    device_bytes: int = 80 * 2**30
    of_device: float = 0.9  # budget / device memory; teraio does not control the rest
    host_bytes: int = 0  # host memory per GPU; no result depends on this number
    pcie: int = 52 * GB  # bytes per second per GPU and direction, measured with copies on PCIe 5.0 x16
    read: int = 27 * GB // 4  # bytes per second of each drive
    write: int = 5 * GB  # bytes per second of each drive
    drive_bytes: int = 3_840 * GB
    # Bytes that a drive may write, by data sheets: 1 drive write per day for five years.
    drive_life_bytes: int = 7_008 * 10**12
    drive_price: int = 600  # dollars
    nvlink: int = 360 * GB  # bytes per second of an all-reduce within a server (bus rate)


ASSUMED = Assumed()


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    gpus: int
    drives: int  # per GPU
    batch: int  # number of sequences of 4096 tokens on all GPUs together
    micro_batches: int = 1
    recompute: bool = True


CASES = (
    Case("llama-3.1-70b", 1, 4, 8),
    Case("llama-3.1-70b", 1, 8, 8),
    Case("llama-3.1-70b", 2, 4, 16),
    Case("llama-3.1-70b", 8, 2, 32),
    Case("llama-3.1-70b", 8, 4, 32),
    Case("dense-1t", 8, 4, 16),
    Case("dense-1t", 8, 8, 16),
    Case("dense-1t", 8, 8, 32),
)


def part_of(profile: Profile, case: Case, hidden: int) -> Profile:
    """Return one GPU's share of a step."""
    gpus = case.gpus
    sent = case.batch // case.micro_batches * 4096 * hidden * 2
    reduce_ns = int(2 * (gpus - 1) / gpus * sent / ASSUMED.nvlink * 1e9)
    kernels = tuple(
        replace(
            kernel,
            duration_ns=-(-kernel.duration_ns // gpus) + (reduce_ns if REDUCED.search(kernel.name) else 0),
            workspace_bytes=-(-kernel.workspace_bytes // gpus),
        )
        for kernel in profile.kernels
    )
    tensors = tuple(replace(each, size_bytes=-(-each.size_bytes // gpus)) for each in profile.tensors)
    return replace(profile, kernels=kernels, tensors=tensors)


def machine_of(case: Case) -> Machine:
    read, written = (min(rate * case.drives, ASSUMED.pcie) for rate in (ASSUMED.read, ASSUMED.write))
    return Machine(
        f"{case.drives} drives per GPU",
        (
            Tier("device", ASSUMED.device_bytes),
            Tier("ssd", ASSUMED.drive_bytes * case.drives),
        ),
        (
            Link("device", "ssd", written, 60_000),
            Link("ssd", "device", read, 90_000),
        ),
    )


def row_of(case: Case, plan_time: float) -> dict[str, Any]:
    decoder = MODELS[case.model][0]
    request = ProfileRequest(
        batch=case.batch // case.micro_batches,
        micro_batches=case.micro_batches,
        sequence=4096,
        checkpoint=not case.recompute,
    )
    profile = part_of(synth(case.model, request), case, decoder.hidden)
    machine, budget = machine_of(case), int(ASSUMED.device_bytes * ASSUMED.of_device)
    began = time.process_time()
    made = planners.plan(profile, machine, budget, time_limit_s=plan_time, recompute=case.recompute)
    planned_s = time.process_time() - began
    plan, step = apply_plan_changes(made, profile)
    written, read = (
        sum(moved_bytes_by_kind(plan, step, "ssd", evict=evict).values()) for evict in (True, False)
    )
    step_s, drives = made.predicted.step_ns / 1e9, case.drives * case.gpus
    life_s = ASSUMED.drive_life_bytes * case.drives / max(written, 1) * step_s
    held = sum(tensor.size_bytes for tensor in profile.tensors if tensor.kind != "input")
    return {
        **asdict(case),
        "step_s": step_s,
        "compute_s": profile.compute_ns / 1e9,
        "bound_s": made.predicted.bound_ns / 1e9,
        "tokens_per_s": case.batch * 4096 / step_s,
        "held_bytes_per_gpu": held,
        "written_bytes_per_drive": written // case.drives,
        "read_bytes_per_drive": read // case.drives,
        "drives_in_all": drives,
        "life_years": life_s / (365.25 * 86_400),
        "drives_dollars": drives * ASSUMED.drive_price,
        "planned_s": planned_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--plan-time", type=float, default=60)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--cases", nargs="*", type=int, default=range(len(CASES)))
    parser.add_argument("-o", "--output", default=str(RESULTS / "scale.json"))
    args = parser.parse_args()
    if args.cpu:
        cpu_clock.use()
    MODELS["dense-1t"] = (DENSE_1T, 0)
    table = Table(
        model=13,
        GPUs=4,
        drives=6,
        batch=5,
        step=8,
        compute=8,
        bound=8,
        **{"written TB": 10, "life": 6, "dollars": 7, "planned": 7},
    )
    rows: list[dict[str, Any]] = []
    for number in args.cases:
        case = CASES[number]
        try:
            rows.append(row_of(case, args.plan_time))
        except TeraioError as error:
            print(f"{case}: {error}", file=sys.stderr)
            rows.append({**asdict(case), "error": str(error)})
            continue
        row = rows[-1]
        table.row(
            *(case.model, case.gpus, row["drives_in_all"], case.batch, row["step_s"], row["compute_s"]),
            *(row["bound_s"], row["written_bytes_per_drive"] * row["drives_in_all"] / 1e12),
            *(row["life_years"], row["drives_dollars"], row["planned_s"]),
        )
        write(args.output, "scale", simulated=True, assumed=asdict(ASSUMED), rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
