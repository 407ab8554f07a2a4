"""Which machine an estimate is for, and how fast it computes.

A name     one of the machines that come with teraio, from data sheets
a file     `teraio doctor -o` writes one
none       the machine that this runs on: its drives and its processor are measured, in about a second

A machine file says what moves bytes and nothing of what computes. For those of a known accelerator that is in
passes/synth; else this processor is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from teraio.errors import OptionError, UnsupportedError
from teraio.formats import shipped_files
from teraio.formats.machine import Machine
from teraio.options import Settings
from teraio.passes.synth import roofline
from teraio.passes.synth.operator_costs import Speeds
from teraio.passes.synth.roofline import Rates
from teraio.runtime.device import choose
from teraio.runtime.store.directories import (
    choose_default_directories,
    open_and_check_store_directory,
    total_free_bytes,
)
from teraio.session.measured_machine import machine_from_links
from teraio.session.tiers import measure_drives
from teraio.units import fmt_rate

GIGA = 10**9

SIDE = 768  # of the matrices that are multiplied
COPY_BYTES = 32 * 2**20  # more than caches hold
LAUNCHES = 500


@dataclass(frozen=True, slots=True)
class MachineWithSpeeds:
    """A machine, what it computes with, and where both figures come from. `available_bytes`: what a share of
    memory is a share of. `files`: directories of the store, whose buffers are in the same memory as tensors;
    0 where they are not."""

    machine: Machine
    speeds: Speeds
    available_bytes: int
    origin: str
    compute: str
    files: int
    device: torch.device  # of the model


def find_machine_and_speeds(
    asked: str | os.PathLike[str] | Machine | None, on: torch.device
) -> MachineWithSpeeds:
    """OptionError or FileFormatError names what is wrong with what was asked for."""
    if asked is None:
        return _measure_this_machine(on)
    if isinstance(asked, Machine):
        machine, origin = asked, "given"
    else:
        path = shipped_files.find_named_file(asked, shipped_files.MACHINES)
        machine = Machine.read(path)
        built_in = path == str(shipped_files.MACHINES.path_of(machine.name))
        origin = "from data sheets, not measured" if built_in else f"from {path}"
    capacity = next(tier.capacity_bytes for tier in machine.tiers if tier.name == "device")
    if known := roofline.accelerator_name_in(machine.name):
        return MachineWithSpeeds(
            machine,
            Speeds(*roofline.ACCELERATORS[known]),
            capacity,
            origin,
            f"times by {known}'s data sheet",
            0,
            on,
        )
    if on.type != "cpu":
        raise OptionError(
            f"estimate: machine {machine.name!r} does not say what computes on {on.type}; its name must "
            f"begin with one of {', '.join(roofline.ACCELERATORS)}"
        )
    speeds, compute = _measure_processor()
    return MachineWithSpeeds(machine, speeds, capacity, origin, compute, 1, on)


def _measure_this_machine(on: torch.device) -> MachineWithSpeeds:
    if on.type != "cpu":
        raise UnsupportedError(
            f"estimate: the model is on {on.type}, which is not measured here; name the machine: "
            f"machine={shipped_files.MACHINES.names()[0]!r}, or a file by `teraio doctor -o`"
        )
    options, used = Settings.parse(), choose.choose_device("cpu")
    directories = [Path(path) for path in options.store_directories] or list(choose_default_directories())
    places = [
        open_and_check_store_directory(path, parents=not options.store_directories) for path in directories
    ]
    try:
        free_bytes = total_free_bytes(places)
        link, _ = measure_drives([place.path for place in places], used)
    finally:
        for place in places:
            os.close(place.fd)
    speeds, compute = _measure_processor()
    machine = machine_from_links("here", [link], used.capacity_bytes(), free_bytes)
    origin = f"measured just now; store in {', '.join(map(str, directories))}"
    return MachineWithSpeeds(machine, speeds, used.default_budget_bytes(), origin, compute, len(places), on)


@cache
def _measure_processor() -> tuple[Speeds, str]:
    """What this processor reaches, by a product of matrices of each kind and a copy."""
    bandwidth = _measure_memory_bandwidth()
    launch_ns = _measure_launch_ns()
    rates = [
        Rates(_measure_flop_per_s(dtype), bandwidth, launch_ns) for dtype in (torch.bfloat16, torch.float32)
    ]
    gflop = rates[1].flop_per_s / GIGA
    told = f"times by what this processor did just now: {gflop:.0f} GFLOP/s in fp32, {fmt_rate(bandwidth)}"
    return Speeds(*rates), told


def _fastest_run_ns(work: Callable[[], object], times: int) -> int:
    """The fastest of some: what else runs only makes them slower."""
    spent = []
    with torch.no_grad():
        for _ in range(times):
            began = time.perf_counter_ns()
            work()
            spent.append(time.perf_counter_ns() - began)
    return max(1, min(spent))


def _measure_flop_per_s(dtype: torch.dtype) -> int:
    left, right = torch.ones(SIDE, SIDE, dtype=dtype), torch.ones(SIDE, SIDE, dtype=dtype)
    return 2 * SIDE**3 * 10**9 // _fastest_run_ns(lambda: left @ right, 4)


def _measure_memory_bandwidth() -> int:
    source, target = torch.ones(COPY_BYTES // 4), torch.empty(COPY_BYTES // 4)
    return 2 * COPY_BYTES * 10**9 // _fastest_run_ns(lambda: target.copy_(source), 4)


def _measure_launch_ns() -> int:
    one = torch.ones(1)

    def launch_many_kernels() -> None:
        for _ in range(LAUNCHES):
            one.add(1)

    return _fastest_run_ns(launch_many_kernels, 2) // LAUNCHES
