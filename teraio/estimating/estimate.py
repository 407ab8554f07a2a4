"""`teraio.estimate`: will it fit, how fast, and what must go where; before there is anything to train.

model, batch   -> copies with fake tensors (fake_tensors.py)
               -> a step by the programs and slots of a real one (dry_run.py, optimizer_step.py)
               -> a profile, as from a measured step (passes/slots/lifetimes.py)
machine        -> links, and what computes (machines.py)
both           -> a plan, and an answer that can be printed (answer.py)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from teraio.errors import OptionError, PlanError, TeraioError, UnsupportedError
from teraio.formats.machine import Machine
from teraio.formats.plan import Plan
from teraio.formats.plan_cache import fingerprint_of_profile
from teraio.formats.profile import Profile
from teraio.options import Memory, Settings
from teraio.passes.planner import planners
from teraio.passes.planner.problem import problem
from teraio.passes.slots import lifetimes
from teraio.passes.synth import operator_costs
from teraio.progress import show_stage, tell_progress
from teraio.runtime.optimizer.strategy import Strategy
from teraio.runtime.store.slabs import slab_bytes_total
from teraio.session.session import RESERVE_BYTES

from . import dry_run, optimizer_step
from .answer import Estimate
from .fake_tensors import Asked, FakeCopies, optimizer_for_copy, training_device, without_fetching
from .machines import MachineWithSpeeds, find_machine_and_speeds
from .torch_errors import INSTEAD, reason_of_error, silence_operator_errors


def estimate(
    model: nn.Module,
    batch: Any,
    memory: str | int,
    *,
    machine: str | os.PathLike[str] | Machine | None = None,
    optimizer: Asked = "adamw",
    loss: Callable[[Any], Any] | None = None,
    planner: str = "greedy",
) -> Estimate:
    """Whether a training step of this model fits into `memory`, and how long it takes; print the answer.

    Nothing of the model is computed, allocated or changed: it may be on `meta`, or larger than this machine.
    `batch`: a tensor, a tuple of arguments or a dict of keyword arguments; shapes on `meta` will do.
    `machine`: a name such as `"h100-4ssd"`, a machine file, or this machine. `optimizer`: a name of
    `torch.optim`, an optimizer of this model, or what makes one of parameters. `loss`: of what the model
    returns, if that has none. `planner`: who plans, as in the options.

    Raises UnsupportedError for a model that is not one graph or an optimizer that needs numbers, OptionError
    and FileFormatError for what is wrong with the arguments.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"estimate: model is of type {type(model).__name__}; give a torch.nn.Module")
    model = getattr(model, "_orig_mod", model)  # what torch.compile made of one
    asked = Settings.parse({"memory": memory, "planner": planner})
    assert asked.memory is not None
    with without_fetching():
        basis = find_machine_and_speeds(machine, training_device(model))
    with show_stage(f"estimating {type(model).__name__}"):
        tell_progress("a step without numbers")
        profile, smallest, budget, notes = _profile_dry_run(
            model, batch, asked.memory, optimizer, loss, basis
        )
        with show_stage(f"planning by {asked.planner}", limit_s=asked.plan_time / 1e9):
            plan, why = _plan_or_explain_failure(profile, basis.machine, budget, asked)
    return Estimate(
        profile=profile,
        plan=plan,
        machine=basis.machine,
        memory_bytes=budget,
        smallest_bytes=smallest,
        peak_bytes=int(_live_bytes_by_tick(profile).max()),
        why=why,
        notes=(*notes, basis.compute),
        origin=basis.origin,
    )


def _profile_dry_run(
    model: nn.Module,
    batch: Any,
    memory: Memory,
    optimizer: Asked,
    loss: Callable[[Any], Any] | None,
    basis: MachineWithSpeeds,
) -> tuple[Profile, int, int, list[str]]:
    """The step, the smallest budget for it, the budget asked for, and what is to be known of it."""
    fakes = FakeCopies(basis.device)
    known = memory.resolve(basis.available_bytes, 0)
    reserve = RESERVE_BYTES + (slab_bytes_total(known, basis.files) if basis.files else 0)
    ledger = dry_run.Ledger(fakes.mode, reserve)
    with without_fetching():
        copied, memo = fakes.copy_model(model)
        stepped = optimizer_for_copy(optimizer, model, copied, memo, fakes.mode)
        call = fakes.copy_batch(batch, model)
    told = _simulate_converting_torch_errors(copied, call, loss, ledger, basis.speeds)

    def profile_with_buckets(limit_bytes: int, by_rows: bool = False) -> tuple[Profile, int, str]:
        ledger.rewind_to(mark)
        note = optimizer_step.simulate_optimizer_step(ledger, stepped, limit_bytes, basis.speeds, by_rows)
        profile = lifetimes.profile_of_steps([ledger.as_measured_step()], type(model).__name__)
        return profile, problem.smallest_budget(profile), note

    # As a run cuts them: several parameters at a time; if these do not fit, each alone; then in slices.
    mark = ledger.rewind_point()
    ways = [profile_with_buckets(0)]
    budget = memory.resolve(basis.available_bytes, ways[0][1])
    limit = Strategy(0).bucket_limit_bytes(budget)
    if ways[0][1] >= budget:
        ways.append(profile_with_buckets(limit, by_rows=True))
    ways.insert(0, profile_with_buckets(limit))
    smallest = min(least for _, least, _ in ways)
    budget = memory.resolve(basis.available_bytes, smallest)
    profile, _, step_told = next((way for way in ways if way[1] <= budget), ways[-1])
    kernels = f"kernels are those of inner='eager' on {fakes.device.type}, one by one; Inductor fuses some"
    notes = [told, f"the optimizer is {type(stepped).__name__}", *[step_told] * bool(step_told), kernels]
    return profile, smallest, budget, notes


def _simulate_converting_torch_errors(
    model: nn.Module,
    batch: tuple[tuple[Any, ...], dict[str, Any]],
    loss: Callable[[Any], Any] | None,
    ledger: dry_run.Ledger,
    speeds: operator_costs.Speeds,
) -> str:
    try:
        with silence_operator_errors(), ledger.mode, torch.enable_grad():
            return dry_run.simulate_forward_and_backward(model, batch, loss, ledger, speeds)
    except TeraioError:
        raise
    except torch._dynamo.exc.Unsupported as error:
        raise UnsupportedError(
            f"estimate: {type(model).__name__} is not one graph: {reason_of_error(error)}. {INSTEAD}"
        ) from error
    except Exception as error:
        if isinstance(inner := getattr(error, "inner_exception", None), TeraioError):
            raise inner from None
        raise UnsupportedError(
            f"estimate: a step of {type(model).__name__} fails on this batch: {reason_of_error(error)}"
            ". Give what one "
            f"call of the model in your loop is given: a tuple of arguments or a dict of keyword arguments"
        ) from error


def _plan_or_explain_failure(
    profile: Profile, machine: Machine, budget: int, asked: Settings
) -> tuple[Plan | None, str]:
    try:
        made = planners.plan(
            profile,
            machine,
            budget,
            planner=asked.planner,
            fingerprint=fingerprint_of_profile(profile),
            time_limit_s=asked.plan_time / 1e9,
        )
    except PlanError as error:
        return None, str(error)
    return made, ""


def _live_bytes_by_tick(profile: Profile) -> Any:
    return problem.build_problem(profile).live
