"""Checks of two costs: (1) the time that a slot takes on the launching thread, (2) the duration of a step,
compared with its kernels and transfers.

A slot is a call of the engine between two kernels. Kernels take a set time, and links carry 50 GB/s. As soon
as steps follow a plan, kernels compute nothing. If the engine finds that steps differ from the plan, it
measures a step and plans again. So timing begins only after several steps that the engine did not measure.

Launching the operators of an eager graph costs more on the stand-in than on a GPU. So a slot's cost is only
the CPU time that the slot itself takes on the launching thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import standin
import torch
from small_llama import Training

import teraio
from teraio.runtime.engine.engine import Engine

VARIABLES = {"STANDIN_LATE_US": "0", "STANDIN_COPY_GB_S": "50"}
ALONE = True
STEPS = 6
STEADY_STEPS, STEPS_MAX = 4, 60
KERNEL_US = (100, 500)


class Slots:
    """Lists of the CPU time of each slot (call of the engine) on the launching thread, in nanoseconds.

    `moving` has the slots that begin or end copies, and `still` has all others.
    """

    def __init__(self) -> None:
        self.still: list[int] = []
        self.moving: list[int] = []
        self.measured = 0  # number of slots in steps that the engine measured
        visit: Callable[..., Any] = Engine.run_slot

        def timed(engine: Engine, *arguments: Any) -> Any:
            counts = engine.residency.mover.counts
            moves, began = counts.evictions + counts.fetches, time.thread_time_ns()
            result = visit(engine, *arguments)
            used = time.thread_time_ns() - began
            moved = counts.evictions + counts.fetches != moves
            self.measured += engine.tracker.running is not None
            (self.moving if moved else self.still).append(used)
            return result

        setattr(Engine, "run_slot", timed)  # noqa: B010

    def clear(self) -> None:
        self.still.clear()
        self.moving.clear()
        self.measured = 0

    def results(self) -> dict[str, Any]:
        return {
            f"{name}_us": round(statistics.median(found) / 1e3, 1) if found else None
            for name, found in (("still", self.still), ("moving", self.moving))
        } | {"slots": (len(self.still) + len(self.moving)) // STEPS, "moves": len(self.moving) // STEPS}


def steps_ms(training: Training) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    training.train(STEPS)
    torch.cuda.synchronize()
    return round((time.perf_counter() - began) * 1e3 / STEPS, 1)


def measured(memory: str, us: int) -> dict[str, Any]:
    """Measure steps that follow a plan within this budget. Each kernel takes `us` microseconds."""
    slots = Slots()
    training = Training(options={"memory": memory, "host_memory": "512MiB"})
    standin.kernels_take(us)
    while training.phases[-1:] != ["planned"]:
        assert len(training.phases) < 12, training.phases
        training.step()
    standin.kernels_compute(False)
    steady = 0
    while steady < STEADY_STEPS:
        assert len(training.phases) < STEPS_MAX, "no plan was followed for some steps in a row"
        slots.clear()
        training.step()
        steady = 0 if slots.measured else steady + 1
    slots.clear()
    before, first = sum(standin.calls().values()), len(training.phases)
    step = steps_ms(training)
    assert slots.measured == 0, "a timed step was measured"
    operators = (sum(standin.calls().values()) - before) // STEPS
    return {
        "step_ms": step,
        "operators_ms": round(operators * us / 1e3, 1),
        "stall_ms": round(teraio.stats()["step_stall_ns"] / 1e6, 1),
        "planned_steps": training.phases[first:].count("planned"),
        **slots.results(),
    }


CASES = {
    f"{name}_{us}_us": partial(measured, memory, us)
    for name, memory in (("fits", "1GiB"), ("moves", "40MiB"))
    for us in KERNEL_US
}
SAMPLE = {"moves_500_us"}
