"""`teraio.estimate`: an estimate of memory, step time and transfers, without training.

model, batch   -> copies with fake tensors (fake_tensors.py)
               -> a simulated step on these copies (dry_run.py, optimizer_step.py)
               -> a profile, as from a measured step (passes/slots/lifetimes.py)
machine        -> links and compute rates (machines.py)
profile, links -> a plan, and a printable answer (answer.py)
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
from .fake_tensors import FakeCopies, OptimizerChoice, optimizer_for_copy, training_device, without_fetching
from .machines import MachineWithSpeeds, find_machine_and_speeds
from .torch_errors import INSTEAD, reason_of_error, silence_operator_errors


def estimate(
    model: nn.Module,
    batch: Any,
    memory: str | int,
    *,
    machine: str | os.PathLike[str] | Machine | None = None,
    optimizer: OptimizerChoice = "adamw",
    loss: Callable[[Any], Any] | None = None,
    planner: str = "greedy",
    updates: str = "auto",
) -> Estimate:
    """Estimate whether a training step of this model fits into `memory`, and how long the step takes.

    Print the result to get a readable answer. The estimate computes nothing with the model, allocates no
    memory for its tensors, and does not change it. The model may be on `meta`, or may be larger than this
    machine's memory.

    batch       a tensor, a tuple of arguments or a dict of keyword arguments; tensors on `meta` suffice
    machine     a name such as `"h100-4ssd"`, a machine file, or None for this machine
    optimizer   a name in `torch.optim`, an optimizer of this model, or a function that makes one
    loss        a function of the model's output, for a model that returns no loss
    planner     the name of a planner, as in the option `planner`
    updates     when the optimizer's updates run, as in the option `updates`; the estimate takes it for
                granted that they may run in the next forward, which a training tries out first

    Raise UnsupportedError if the model cannot be captured as one graph, or if the optimizer's step needs the
    values in tensors. Raise OptionError or FileFormatError for a wrong argument.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"estimate: model is of type {type(model).__name__}; give a torch.nn.Module")
    model = getattr(model, "_orig_mod", model)  # torch.compile returns a wrapper; this is the model inside
    settings = Settings.parse({"memory": memory, "planner": planner, "updates": updates})
    assert settings.memory is not None
    with without_fetching():
        basis = find_machine_and_speeds(machine, training_device(model))
    with show_stage(f"estimating {type(model).__name__}"):
        tell_progress("a step on fake tensors")
        profile, smallest, budget, notes = _profile_dry_run(
            model, batch, settings.memory, optimizer, loss, basis
        )
        with show_stage(f"planning by {settings.planner}", limit_s=settings.plan_time / 1e9):
            plan, why = _plan_or_explain_failure(profile, basis.machine, budget, settings)
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
    optimizer: OptimizerChoice,
    loss: Callable[[Any], Any] | None,
    basis: MachineWithSpeeds,
) -> tuple[Profile, int, int, list[str]]:
    """Simulate a step, and return (1) its profile, (2) the smallest budget that has a plan, (3) the requested
    budget in bytes, (4) notes.
    """
    fakes = FakeCopies(basis.device)
    known = memory.resolve(basis.available_bytes, 0)
    reserve = RESERVE_BYTES + (slab_bytes_total(known, basis.files) if basis.files else 0)
    ledger = dry_run.Ledger(fakes.mode, reserve)
    with without_fetching():
        copied, memo = fakes.copy_model(model)
        stepped = optimizer_for_copy(optimizer, model, copied, memo, fakes.mode)
        call = fakes.copy_batch(batch, model)
    loss_note = _simulate_converting_torch_errors(copied, call, loss, ledger, basis.speeds)

    def profile_with_buckets(limit_bytes: int, by_rows: bool = False) -> tuple[Profile, int, str]:
        ledger.rewind_to(mark)
        note = optimizer_step.simulate_optimizer_step(ledger, stepped, limit_bytes, basis.speeds, by_rows)
        profile = lifetimes.profile_of_steps([ledger.as_measured_step()], type(model).__name__)
        return profile, problem.smallest_budget(profile), note

    # Split the optimizer's step into buckets of parameters as in a training. Take the first of these splits
    # that fits into the budget: (1) several parameters per bucket, (2) one parameter per bucket, (3) slices
    # of parameters.
    mark = ledger.rewind_point()
    variants = [profile_with_buckets(0)]
    budget = memory.resolve(basis.available_bytes, variants[0][1])
    limit = Strategy(0).bucket_limit_bytes(budget)
    if variants[0][1] >= budget:
        variants.append(profile_with_buckets(limit, by_rows=True))
    variants.insert(0, profile_with_buckets(limit))
    smallest = min(least for _, least, _ in variants)
    budget = memory.resolve(basis.available_bytes, smallest)
    profile, _, step_note = next((each for each in variants if each[1] <= budget), variants[-1])
    kernels = f"kernels run one by one, as with inner='eager' on {fakes.device.type}; Inductor fuses some"
    notes = [loss_note, f"the optimizer is {type(stepped).__name__}", *[step_note] * bool(step_note), kernels]
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
            f"estimate: a step of {type(model).__name__} fails on this batch: {reason_of_error(error)}. Give "
            "the arguments of one model call in your loop, as a tuple or as a dict of keyword arguments"
        ) from error


def _plan_or_explain_failure(
    profile: Profile, machine: Machine, budget: int, settings: Settings
) -> tuple[Plan | None, str]:
    try:
        made = planners.plan(
            profile,
            machine,
            budget,
            planner=settings.planner,
            fingerprint=fingerprint_of_profile(profile),
            time_limit_s=settings.plan_time / 1e9,
            updates=settings.updates,
        )
    except PlanError as error:
        return None, str(error)
    return made, ""


def _live_bytes_by_tick(profile: Profile) -> Any:
    return problem.build_problem(profile).live
