"""A simulation of an optimizer's step on fake parameters. The step runs in buckets of parameters, with a slot
before each bucket.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from teraio.errors import UnsupportedError
from teraio.formats.schedule import READ, WRITE
from teraio.passes.synth import operator_costs
from teraio.runtime.optimizer import trial
from teraio.runtime.optimizer.buckets import Bucket, make_stand_in, named_tensors_in, split_into_buckets
from teraio.runtime.optimizer.slices import split_into_slices
from teraio.runtime.optimizer.step_call import make_optimizer_schedule, temporary_bytes

from .dry_run import CostCounter, Ledger, Record
from .torch_errors import reason_of_error


def simulate_optimizer_step(
    ledger: Ledger,
    optimizer: torch.optim.Optimizer,
    limit_bytes: int,
    speeds: operator_costs.Speeds,
    by_rows: bool = False,
) -> str:
    """Simulate an optimizer step, and record it in the ledger. Each bucket has up to `limit_bytes` of
    parameters.

    If `by_rows` is True and the optimizer permits it, cut parameters larger than `limit_bytes` into slices.
    Return a note if the optimizer cannot step in buckets, otherwise "".
    """
    name, seen = type(optimizer).__name__, trial.try_in_buckets(optimizer)
    by_rows = by_rows and seen.reason is None and trial.can_step_by_rows(optimizer)
    buckets = (split_into_slices if by_rows else split_into_buckets)(optimizer.param_groups, limit_bytes)
    if seen.reason is not None:
        every = [parameter for bucket in buckets for parameter in bucket.parameters]
        buckets = [Bucket({**buckets[0].group, "foreach": True}, every)]
    try:
        with ledger.mode:
            _step_buckets_counting_ns(optimizer, buckets, CostCounter(speeds))  # creates the states
            spent = _step_buckets_counting_ns(optimizer, buckets, CostCounter(speeds))
    except Exception as error:
        raise UnsupportedError(
            f"estimate: {name} cannot step on fake tensors ({reason_of_error(error)}). Estimate with another "
            f"optimizer that has as many states, such as 'adamw' (2 per parameter) or 'sgd'"
        ) from error
    members = [
        _find_or_add_bucket_records(ledger, optimizer, bucket, at) for at, bucket in enumerate(buckets)
    ]
    gradients = () if seen.writes_gradients else [p.grad for b in buckets for p in b.parameters]
    read_only = {id(ledger.record_of(gradient)) for gradient in gradients if gradient is not None}
    sizes = [[p.nbytes for p in bucket.parameters if p.grad is not None] for bucket in buckets]
    own = [temporary_bytes(bucket, of, seen.temporaries) for bucket, of in zip(buckets, sizes)]
    _add_optimizer_call(ledger, name, members, own, spent, read_only)
    return "" if seen.reason is None else f"{name} steps all of its parameters at once: {seen.reason}"


def _step_buckets_counting_ns(
    optimizer: torch.optim.Optimizer, buckets: list[Bucket], counted: CostCounter
) -> list[int]:
    """Run the optimizer's own `step` code, bucket by bucket. Return the estimated time of each bucket."""
    spent: list[int] = []

    def yield_timed_buckets() -> Iterator[Bucket]:
        for bucket in buckets:
            before = counted.ns
            yield bucket
            spent.append(counted.ns - before)

    run = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
    with counted, torch.compiler.set_stance("force_eager"):
        run(make_stand_in(optimizer, yield_timed_buckets))
    return spent


def _find_or_add_bucket_records(
    ledger: Ledger, optimizer: torch.optim.Optimizer, bucket: Bucket, at: int
) -> dict[int, Record]:
    """Return the records of a bucket's parameters, gradients and states, by the id of the record.

    They have the same order as in a real training.
    """
    found: dict[int, Record] = {}
    for place, parameter in enumerate(p for p in bucket.parameters if p.grad is not None):
        record = ledger.record_of(parameter)
        base = f"optimizer 0.{at}.{place}" if record is None else record.name
        states = named_tensors_in(optimizer.state.get(parameter, {}), base)
        gradient = parameter.grad
        known = [record, ledger.record_of(gradient) if gradient is not None else None]
        known += [
            ledger.record_of(state) or ledger.add_record(state, name, "state", True) for state, name in states
        ]
        found.update((id(each), each) for each in known if each is not None)
    return found


def _add_optimizer_call(
    ledger: Ledger,
    name: str,
    members: list[dict[int, Record]],
    own: list[int],
    spent: list[int],
    read_only: set[int],
) -> None:
    records = {k: record for bucket in members for k, record in bucket.items() if record.movable}
    index = {key: position for position, key in enumerate(records)}
    arguments = [(record.name, record.size_bytes) for record in records.values()]
    firsts = [next((record.name for record in bucket.values()), "") for bucket in members]
    kernels = [f"{name}.step {first}".rstrip() for first in firsts]
    flags = {key: READ if key in read_only else READ | WRITE for key in index}
    touched = [tuple((index[key], flags[key]) for key in bucket if key in index) for bucket in members]
    schedule = make_optimizer_schedule(arguments, kernels, touched, own)
    running = ledger.start_call(schedule, list(records.values()))
    for slot, cost_ns in zip(schedule.slots, (0, *spent, 0)):
        ledger.log_slot_and_advance_clock(running, slot.live_bytes, cost_ns)
