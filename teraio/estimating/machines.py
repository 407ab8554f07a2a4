"""The machine of an estimate, and its compute rates.

a name     one of the machines that come with teraio, from data sheets
a file     a machine file, as `teraio doctor -o` writes it
None       the current machine: its drives and its processor are measured, in about a second

A machine file describes links but has no compute rates. If the machine's name begins with the name of a known
accelerator, the rates come from passes/synth. Otherwise, this module measures the rates of the current
processor.
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

SIDE = 768  # rows and columns of the matrices in the measured product
COPY_BYTES = 32 * 2**20  # size of the measured copy; it exceeds the caches of processors
LAUNCHES = 500


@dataclass(frozen=True, slots=True)
class MachineWithSpeeds:
    """A machine with its compute rates.

    `origin` names the source of the machine's figures, and `compute` the source of the rates. A budget in
    percent is a percentage of `available_bytes`. `files` is the number of the store's directories if the
    store's buffers take memory from the budget. Otherwise, `files` is 0.
    """

    machine: Machine
    speeds: Speeds
    available_bytes: int
    origin: str
    compute: str
    files: int
    device: torch.device  # the model's device


def find_machine_and_speeds(
    choice: str | os.PathLike[str] | Machine | None, on: torch.device
) -> MachineWithSpeeds:
    """Return the chosen machine with its compute rates. Raise OptionError or FileFormatError if the choice is
    invalid.
    """
    if choice is None:
        return _measure_this_machine(on)
    if isinstance(choice, Machine):
        machine, origin = choice, "given"
    else:
        path = shipped_files.find_named_file(choice, shipped_files.MACHINES)
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
            f"estimate: the compute rates of machine {machine.name!r} on {on.type} are unknown; its name "
            f"must begin with one of {', '.join(roofline.ACCELERATORS)}"
        )
    speeds, compute = _measure_processor()
    return MachineWithSpeeds(machine, speeds, capacity, origin, compute, 1, on)


def _measure_this_machine(on: torch.device) -> MachineWithSpeeds:
    if on.type != "cpu":
        raise UnsupportedError(
            f"estimate: the model is on {on.type}, but an estimate measures only CPUs. Give a machine: "
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
    """Measure the compute rates of this processor, with a copy and with one matrix product per dtype.

    Return the rates, and a text that names their source.
    """
    bandwidth = _measure_memory_bandwidth()
    launch_ns = _measure_launch_ns()
    rates = [
        Rates(_measure_flop_per_s(dtype), bandwidth, launch_ns) for dtype in (torch.bfloat16, torch.float32)
    ]
    gflop = rates[1].flop_per_s / GIGA
    source = f"times by this processor, measured just now: {gflop:.0f} GFLOP/s in fp32, {fmt_rate(bandwidth)}"
    return Speeds(*rates), source


def _fastest_run_ns(work: Callable[[], object], times: int) -> int:
    """Run `work` several times, and return the time of the fastest run. Other processes can only slow a run
    down.
    """
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
