"""Optimizers' steps as calls of the training step. Each step has one slot per bucket. A bucket is a set of
parameters that are stepped together. At a slot, the engine makes the bucket's tensors resident.

In: an optimizer, its strategy, a budget. Out: (1) buckets that are resident one after another, and (2) a
program with a slot per bucket. The engine plans moves for this program as for a compiled program.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType

import torch
from torch._C import DisableTorchFunctionSubclass

from teraio.errors import TeraioError, TornStepError
from teraio.formats.schedule import READ, WRITE, Buffer, Schedule, Slot
from teraio.formats.updates import ON_HOST
from teraio.ranks import failures

from ..eager.signals import SIGNALS, is_code_on_stack
from ..engine.engine import Engine
from ..ledger.engine_lock import hold_lock_during_method
from ..ledger.record import Record
from ..ledger.residency import Need
from ..ledger.shards import local_tensor
from ..step.program import Program
from . import host_step
from .buckets import Bucket, named_tensors_in, split_into_buckets
from .late_buckets import LateBuckets
from .slices import largest_slice_bytes, slices_of_bucket, split_into_slices
from .strategy import Strategy

log = logging.getLogger("teraio")

Member = tuple[torch.Tensor, Record | None]


class OptimizerCall:
    """One run of an optimizer's step, bucket by bucket. A bucket is a set of parameters that are stepped
    together."""

    def __init__(
        self, engine: Engine, optimizer: torch.optim.Optimizer, about: Strategy, closure: bool
    ) -> None:
        self.engine = engine
        self.optimizer = optimizer
        self.about = about
        self.program: Program | None = None
        self.buckets: list[Bucket] = []
        self.stepped: list[list[tuple[torch.Tensor, str]]] = []  # per bucket: (parameter, name) pairs
        self.members: list[list[Member]] = []
        self.gradients: set[int] = set()  # ids of the tensors in `members` that are gradients
        self.own_bytes: list[int] = []  # per bucket: bytes of its update's temporary tensors
        self.born_bytes: list[int] = []  # per bucket: estimated bytes of the states that its update makes
        self.visited: set[int] = set()
        self.current: int | None = None
        self.has_closure = closure
        self.closure = False  # True: a closure will make gradients in the middle of the step
        # True: one bucket has all parameters, and the user's hooks on the step may use these parameters.
        self.whole = False
        self.on_host: set[int] = set()  # numbers of the buckets that are stepped on the host
        self.owed: set[int] = set()  # numbers of the buckets whose updates run late
        self.updated: set[int] = set()  # numbers of the buckets that the backward has updated
        self.movable: list[int] = []  # numbers of the buckets that the next backward may be able to update
        self.slots: dict[int, int] = {}  # number of a bucket that is stepped now -> its slot in `program`
        self.late = LateBuckets(engine, optimizer, about)
        host, reason = host_step.host_step_of(engine), "its step has a closure" if closure else None
        self.host = host if host is not None and host.can_step_optimizer(optimizer, reason) else None

    # ---- iteration over the groups, by the step's code

    def iterate_buckets(self) -> Iterator[Bucket]:
        if self.program is None:
            with failures.reporting():
                self.begin_with_fitting_split(self._possible_splits())
        for at, bucket in enumerate(self.buckets):
            if at in self.on_host:
                with failures.reporting():
                    self._step_bucket_on_host(at)
                yield Bucket(bucket.group, [])
            elif at in self.owed or at in self.updated:
                if at in self.owed:
                    self._owe_bucket(at)
                # Small parameters have no records. They are stepped now.
                yield Bucket(bucket.group, [p for p, _ in self.stepped[at] if self.late.is_small(p)])
            else:
                with failures.reporting():
                    self.open_bucket(at)
                yield from slices_of_bucket(self.optimizer, bucket)
        self.close_bucket()

    def _step_bucket_on_host(self, at: int) -> None:
        """Step a bucket on the host, unless it has already been stepped. The step's code may iterate over the
        groups several times."""
        if at not in self.visited:
            assert self.host is not None
            self.open_bucket(at)
            with self._mark_torn_on_error(at, begun=len(self.visited) > 1):
                after = self.stepped[at + 1] if at + 1 in self.on_host else []
                both = ([parameter for parameter, _ in pairs] for pairs in (self.stepped[at], after))
                self.host.step_bucket(self.optimizer, self.buckets[at].group, *both)
            self.close_bucket()

    @hold_lock_during_method
    def _owe_bucket(self, at: int) -> None:
        """Let the update of a bucket run late, unless this has already been done. The step's code may iterate
        over the groups several times."""
        if at in self.visited:
            return
        self.close_bucket()
        if not self.visited:
            SIGNALS.begin_optimizer_step(code_of_step_function(self.optimizer))
        self.visited.add(at)
        members = self.members[at]
        self.late.owe_bucket(
            self.buckets[at],
            self.stepped[at],
            members,
            self._access_flags_among(members),
            self.own_bytes[at],
            self._kernel_name(members),
        )

    def _possible_splits(self) -> Iterator[list[Bucket]]:
        """Yield possible divisions of the parameters into buckets. The order is: (1) several parameters per
        bucket, (2) one parameter per bucket, (3) slices of a parameter."""
        groups = self.optimizer.param_groups
        limit = self.about.bucket_limit_bytes(self.engine.residency.budget_bytes)
        yield split_into_buckets(groups, limit)
        yield split_into_buckets(groups, 0)
        if self.about.can_step_by_rows(self.optimizer):
            yield split_into_slices(groups, limit, self.optimizer.state)

    def open_all_as_one_bucket(self) -> None:
        """Open one bucket of all parameters of all groups.

        If the user passed a closure, the bucket also has the parameters without gradients, because the
        closure makes their gradients. Programs that the closure runs may evict tensors of the bucket.
        """
        groups = self.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        self.closure, self.whole = self.has_closure, True
        if self.host is not None:
            self.host.can_step_optimizer(self.optimizer, "it steps all parameters at once")
            self.host = None
        self.begin_with_fitting_split(
            [[Bucket({**(groups[0] if groups else {}), "foreach": True}, parameters)]]
        )
        self.open_bucket(0)
        self.engine.user.eager_memory.begin_user_code_measure()

    # ---- one run of the step

    @hold_lock_during_method
    def begin_with_fitting_split(self, ways: Iterable[list[Bucket]]) -> None:
        """Begin the optimizer's step with the first division into buckets that fits in the budget."""
        engine = self.engine
        engine.user.eager_memory.end_user_code_measure()
        engine.end_step_if_optimizer_repeats(self.about.number)
        engine.unresizable.detect_and_adopt_newly_unresizable()
        self._register_eager_weights()
        if engine.late.backward.pending:  # no handler may run between the two parts of an update
            SIGNALS.begin_optimizer_step(code_of_step_function(self.optimizer))
        done = self.late.confirm_updates(self.whole or self.has_closure)
        need: Need | None = None
        for buckets in ways:
            self._gather_bucket_tensors(buckets)
            updated = self.late.updated_buckets(self.stepped, done)
            if updated is None:  # only finer buckets divide the weights as the backward did
                continue
            self.updated = updated
            self.on_host -= updated
            if (need := self._first_unmet_need()) is None:
                break
        if need is not None:
            engine.residency.refuse_or_grow_budget(need)
        self._choose_owed_buckets()
        self.program, bound = self._program_and_its_records()
        engine.tracker.begin_call(self.program)
        engine.update_expected_uses()
        self.program.begin_call(bound)
        try:
            engine.run_slot(self.program, 0, (), 0)
        except BaseException:
            engine.abandon_call()
            raise

    def _choose_owed_buckets(self) -> None:
        """Choose the buckets whose updates run late, and those that the next backward may be able to
        update."""
        if self.has_closure:
            self.late.report_closure()
        if self.whole or self.has_closure or not self.late.may_owe_any():
            return
        taken: set[int] = set()  # storages of such buckets; two updates of one storage keep their order
        for at, bucket in enumerate(self.buckets):
            fixed = at in self.on_host or at in self.updated or self.born_bytes[at]
            if bucket.parameters and not fixed:
                members = self.members[at]
                keys = self.late.separate_storages(members)
                kernel = self._kernel_name(members)
                possible = bool(keys) and taken.isdisjoint(keys)
                if possible:
                    taken |= keys
                    late = self.late.may_owe(self.stepped[at], members, kernel)
                    self.owed.add(at) if late else self.movable.append(at)
        self.late.note_settings()

    def _note_candidates(self) -> None:
        """Let the next backward run the updates that it can run. This step has shown how they raise
        versions."""
        for at in self.movable:
            members, own_bytes = self.members[at], self.own_bytes[at]
            kernel = self._kernel_name(members)
            self.late.note_candidate(self.buckets[at], self.stepped[at], members, own_bytes, kernel)
        self.engine.late.note_open()

    def _register_eager_weights(self) -> None:
        """Register all parameters of this optimizer with the engine, if compiled programs use at least one
        parameter. The reason is that all parameters of an optimizer usually belong to one model."""
        groups = self.optimizer.param_groups
        count = sum(len(group["params"]) for group in groups)
        if count == self.about.registered_count:
            return
        registry, known_tensors = self.engine.registry, self.engine.known_tensors
        named = {
            f"optimizer {self.about.number}.{place}.{at}": parameter
            for place, group in enumerate(groups)
            for at, parameter in enumerate(group["params"])
        }
        for parameter in named.values():
            known_tensors.note_whole(parameter)
        known = [
            p for p in named.values() if (r := known_tensors.record_of(p)) is not None and r.kind == "weight"
        ]
        if known:
            self.about.note_registered(count)
            with DisableTorchFunctionSubclass():
                for name, parameter in named.items():
                    if parameter.device == known[0].device and parameter.layout == torch.strided:
                        registry.register_eager_weight(parameter, name)

    def _program_and_its_records(self) -> tuple[Program, list[Record | None]]:
        """Return a program with one slot per bucket, and the records of the tensors that the program uses."""
        records = list(self._evictable_records().values())
        index = {record.key: position for position, record in enumerate(records)}
        now = [at for at in range(len(self.members)) if at not in self.owed and at not in self.updated]
        self.slots = {at: slot for slot, at in enumerate(now, 1)}
        touched = [
            tuple((index[r.key], flags) for r, flags in self._access_flags_by_record(at) if r.key in index)
            for at in now
        ]
        facts = tuple([(record.name, record.size_bytes) for record in records])
        kernels = [
            self._kernel_name(self.members[at]) + (ON_HOST if at in self.on_host else "") for at in now
        ]
        own_bytes = [self.own_bytes[at] for at in now]
        key = (facts, *touched, *own_bytes, *kernels)
        program = self.about.cached_program(
            key, lambda: make_optimizer_schedule(facts, kernels, touched, own_bytes)
        )
        return program, [*records]

    def _evictable_records(self) -> dict[int, Record]:
        """Return the evictable records of all buckets that are stepped on the device, by storage key."""
        return _evictable_records_among(
            member for at in range(len(self.members)) for member in self._members_on_device(at)
        )

    def _members_on_device(self, at: int) -> list[Member]:
        """Return the tensors of bucket `at` that must be resident on the device, each with its record. If the
        host steps the bucket, or if its update does not run now, return an empty list."""
        return [] if at in self.on_host or at in self.owed or at in self.updated else self.members[at]

    def _access_flags_by_record(self, at: int) -> list[tuple[Record, int]]:
        """Return each record of bucket `at`, with flags that show whether the update reads or writes the
        record's tensor."""
        return self._access_flags_among(self._members_on_device(at))

    def _access_flags_among(self, members: Iterable[Member]) -> list[tuple[Record, int]]:
        """Return each record of these members of a bucket, with flags that show whether the update reads or
        writes the record's tensor."""
        found: dict[int, tuple[Record, int]] = {}
        # If `grad_scale` is set, the update divides the gradients in place.
        scaled = getattr(self.optimizer, "grad_scale", None) is not None
        read_only = not (scaled or self.whole or self.about.seen.writes_gradients)
        for tensor, record in members:
            if record is not None:
                flags = READ if read_only and id(tensor) in self.gradients else READ | WRITE
                found[record.key] = record, found.get(record.key, (record, 0))[1] | flags
        return list(found.values())

    def _kernel_name(self, members: list[Member]) -> str:
        first = next((record.name for _, record in members if record is not None), "")
        return f"{type(self.optimizer).__name__}.step {first}".rstrip()

    def _first_unmet_need(self) -> Need | None:
        """Return the memory need of the first bucket that does not fit in the budget, even if all other
        tensors are evicted. If every bucket fits, return None.

        Call this method before the first bucket is stepped.
        """
        residency = self.engine.residency
        residency.forget_dead_records()
        for at, members in enumerate(self.members):
            kernel_bytes = sum(
                r.size_bytes for r in _evictable_records_among(members).values()
            ) + self._temporary_and_new_bytes(at)
            need = Need(residency.fixed_bytes, kernel_bytes, self._kernel_name(members))
            if residency.is_over_budget(need):
                return need
        return None

    @hold_lock_during_method
    def open_bucket(self, at: int) -> None:
        """Make the tensors of bucket `at` resident. First close the previous bucket, whose tensors may then
        be evicted."""
        self.close_bucket()
        engine, program, members = self.engine, self.program, self._members_on_device(at)
        assert program is not None
        running = engine.tracker.running
        with self._mark_torn_on_error(at, begun=bool(self.visited or self.updated)):
            if at in self.visited or (running is not None and running.program is not program):
                engine.residency.advance_slot()
                needed = [record for _, record in members if record is not None]
                engine.residency.make_resident_within_budget(
                    needed, self._temporary_and_new_bytes(at), self._kernel_name(members), None
                )
                for record, flags in self._access_flags_by_record(at):
                    if flags & WRITE:
                        record.wrote()
            else:
                engine.run_slot(program, self.slots[at], (), self._temporary_and_new_bytes(at))
        if not self.visited:
            SIGNALS.begin_optimizer_step(code_of_step_function(self.optimizer))
        self.visited.add(at)
        self.current = at
        self.late.begin_update(self.stepped[at])
        tensors = [tensor for tensor, _ in members]
        if not self.closure:  # programs of a closure may evict the tensors; later reads fetch them
            engine.user.begin_optimizer_update(tensors)

    @contextmanager
    def _mark_torn_on_error(self, at: int, begun: bool) -> Iterator[None]:
        """Raise TornStepError if an error of the engine ends the step after some buckets were stepped. The
        weights then belong to no whole step."""
        try:
            yield
        except BaseException as error:
            self.engine.abandon_call()
            if not isinstance(error, TeraioError) or not begun:
                raise
            self.engine.residency.declare_loss(error, known=True)
            raise TornStepError(
                f"the step of {type(self.optimizer).__name__} ended after {at} of {len(self.buckets)} "
                f"buckets: {error}. Weights and states belong to no whole step. Call teraio.reset() and load "
                f"the last checkpoint"
            ) from error

    @hold_lock_during_method
    def close_bucket(self) -> None:
        """Close the open bucket after its update. Register the states that the update made with the
        engine."""
        if self.current is None:
            return
        at, self.current = self.current, None
        self.late.end_update()
        known = {id(tensor) for tensor, _ in self.members[at]}
        self.members[at] += [
            (tensor, self.engine.registry.register_optimizer_state(tensor, name))
            for parameter, base in self.stepped[at]
            for tensor, name in self._named_states_of_parameter(parameter, base)
            if id(tensor) not in known
        ]
        self.engine.known_tensors.remove_rebound([tensor for tensor, _ in self.members[at]])
        self.engine.user.end_optimizer_update()

    @property
    def is_update_running(self) -> bool:
        """Return whether the optimizer's own update runs now, on tensors that the engine keeps resident."""
        if self.current is None or self.closure:
            return False
        return is_code_on_stack(code_of_step_function(self.optimizer), inspect.currentframe())

    @hold_lock_during_method
    def end(self) -> None:
        self.close_bucket()
        self._note_candidates()
        if self.program is not None:
            if any(self.born_bytes):  # the step made states, so later steps have another program; use it now
                self._gather_bucket_tensors(self.buckets)
                self.program, bound = self._program_and_its_records()
                self.program.begin_call(bound)
                self.engine.tracker.replace_running_program(self.program)
            self.engine.run_slot(self.program, self.program.last, (), 0)
        self.engine.finish_optimizer_step()
        SIGNALS.end_optimizer_step()

    # ---- the tensors of a bucket

    def _gather_bucket_tensors(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        with DisableTorchFunctionSubclass():
            self.stepped = [
                list(self._named_parameters_to_step(bucket, at)) for at, bucket in enumerate(buckets)
            ]
            states = [
                [[*self._named_states_of_parameter(p, base)] for p, base in stepped]
                for stepped in self.stepped
            ]
            self.gradients = {
                id(local_tensor(p.grad)) for bucket in self.stepped for p, _ in bucket if p.grad is not None
            }
            self.engine.registry.copy_foreign_states(
                pair for bucket in states for pairs in bucket for pair in pairs
            )
            self.members = [self._register_tensors_of_bucket(*both) for both in zip(self.stepped, states)]
            self.on_host = {at for at in range(len(buckets)) if self._is_host_bucket(at)}
            self.born_bytes = [self._new_state_bytes(at) for at in range(len(buckets))]
            self.own_bytes = [self._temporary_bytes(at) for at in range(len(buckets))]

    def _is_host_bucket(self, at: int) -> bool:
        bucket = self.buckets[at]
        # If `registered_count` is 0, no compiled program uses the optimizer's model. The host does not step
        # such models.
        if self.host is None or bucket.slices > 1 or not self.about.registered_count:
            return False
        parameters = [parameter for parameter, _ in self.stepped[at]]
        kernel = self._kernel_name(self.members[at])
        return self.host.is_host_bucket(kernel, self.optimizer, bucket.group, parameters)

    def _named_parameters_to_step(self, bucket: Bucket, at: int) -> Iterator[tuple[torch.Tensor, str]]:
        """Yield the bucket's parameters that have gradients, each with the name of its record. With a
        closure, also yield parameters without gradients. A parameter without a record is named by its
        position."""
        for place, parameter in enumerate(bucket.parameters):
            if parameter.grad is not None or self.closure:
                local = local_tensor(parameter)
                record = self.engine.known_tensors.records.get(id(local))
                record = record or self.engine.residency.records.get(local.untyped_storage()._cdata)
                yield (
                    parameter,
                    f"optimizer {self.about.number}.{at}.{place}" if record is None else record.name,
                )

    def _register_tensors_of_bucket(
        self, stepped: list[tuple[torch.Tensor, str]], states: list[list[tuple[torch.Tensor, str]]]
    ) -> list[Member]:
        """Register the bucket's parameters, gradients and states with the engine. Return each tensor with its
        record."""
        registry = self.engine.registry
        members: list[Member] = []
        for (parameter, base), pairs in zip(stepped, states):
            local = local_tensor(parameter)
            members.append((local, registry.register_immovable(local, base, "outside")))
            if parameter.grad is not None:
                gradient = local_tensor(parameter.grad)
                members.append((gradient, registry.register_immovable(gradient, f"{base}.grad", "grad")))
            members += [(tensor, registry.register_optimizer_state(tensor, name)) for tensor, name in pairs]
        return members

    def _named_states_of_parameter(
        self, parameter: torch.Tensor, base: str
    ) -> Iterator[tuple[torch.Tensor, str]]:
        for name, value in self.optimizer.state.get(parameter, {}).items():
            for tensor, tensor_name in named_tensors_in(value, f"{base}.{name}"):
                yield local_tensor(tensor), tensor_name

    def _temporary_and_new_bytes(self, at: int) -> int:
        return self.own_bytes[at] + self.born_bytes[at]

    def _new_state_bytes(self, at: int) -> int:
        """Estimate the number of bytes of the states that the update of bucket `at` will make. An update
        makes states for parameters that have no states yet."""
        without = [local_tensor(p).nbytes for p, _ in self.stepped[at] if not self.optimizer.state.get(p)]
        return int(self.about.seen.born * sum(without))

    def _temporary_bytes(self, at: int) -> int:
        if at in self.on_host:
            return 0
        seen, bucket = self.about.seen, self.buckets[at]
        sizes = [local_tensor(p).nbytes for p, _ in self.stepped[at]]
        own = temporary_bytes(bucket, sizes, seen.temporaries)
        # Add the new states of one slice. They exist beside the new states of the parameter, until they are
        # copied.
        if bucket.slices > 1 and self.born_bytes[at]:
            own += int(seen.born * largest_slice_bytes(bucket))
        return own


def make_optimizer_schedule(
    arguments: Sequence[tuple[str, int]],
    kernels: Sequence[str],
    touched: Sequence[Sequence[tuple[int, int]]],
    own_bytes: Sequence[int],
) -> Schedule:
    """Make the schedule of an optimizer's step: a list of slots with one slot per bucket. At a slot, the
    engine makes the bucket's tensors resident.

    `arguments` has (name, size_bytes) for each tensor of the step. Each of the other three arguments has one
    entry per bucket:

        kernels     the name of the bucket's update
        touched     (index into `arguments`, flags) for each tensor that the update reads or writes
        own_bytes   the bytes of the update's temporary tensors
    """
    buffers = tuple(Buffer(name, "argument", size_bytes) for name, size_bytes in arguments)
    slots = [Slot("enter", tuple(range(len(buffers))), (0,) * len(buffers), 0)]
    for kernel, pairs, live_bytes in zip(kernels, touched, own_bytes):
        indices, flags = (tuple(pair[place] for pair in pairs) for place in (0, 1))
        slots.append(Slot(kernel, indices, flags, live_bytes))
    return Schedule("optimizer", buffers, (*slots, Slot("exit", (), (), 0)))


def temporary_bytes(bucket: Bucket, sizes: list[int], temporaries: float) -> int:
    """Return the number of bytes of temporary tensors that the update of a bucket needs. `sizes` has the
    bytes of each parameter. `temporaries` is the number of temporary bytes per byte of parameter.

    If the update loops over parameters, it needs temporaries for only one parameter or slice at a time. The
    loop also keeps one temporary tensor of the previous parameter. Fused kernels need no temporaries.
    """
    if not sizes or bucket.group.get("fused"):
        return 0
    if bucket.slices > 1:
        return int(temporaries * largest_slice_bytes(bucket))
    loops = bucket.group.get("foreach") is False or (
        bucket.group.get("foreach", "") is None and bucket.parameters[0].device.type == "cpu"
    )
    if not loops:
        return int(temporaries * sum(sizes))
    previous = max(sizes) if temporaries and len(sizes) > 1 else 0
    return int(temporaries * max(sizes)) + previous


def _evictable_records_among(members: Iterable[Member]) -> dict[int, Record]:
    return {record.key: record for _, record in members if record is not None and record.evictable}


def code_of_step_function(optimizer: torch.optim.Optimizer) -> CodeType | None:
    """Return the code object of torch's wrapper around `step`. The wrapper calls the hooks and the
    optimizer's own step. It is on the stack from the first hook to the last."""
    code: CodeType | None = getattr(getattr(type(optimizer), "step", None), "__code__", None)
    return code


def is_step_uncompiled(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the running step of this optimizer is not compiled. Hooks of the step call this
    function.

    A step counts as compiled in two cases. (1) The function that called the hook is not torch's wrapper
    around `step`. (2) The wrapper runs inside of Dynamo's `compile_wrapper`.
    """
    frame = inspect.currentframe()
    wrapper = code_of_step_function(optimizer)
    while frame is not None and not frame.f_code.co_filename.endswith("optim/optimizer.py"):
        frame = frame.f_back
    if frame is None or frame.f_code is not wrapper:
        return False
    while (frame := frame.f_back) is not None:
        if frame.f_code.co_filename.endswith("_dynamo/eval_frame.py"):
            return frame.f_code.co_name != "compile_wrapper"  # other functions of this file switch Dynamo off
    return True
