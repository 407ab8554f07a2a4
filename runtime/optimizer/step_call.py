"""An optimizer's step as a call of the training step: a slot per bucket, what the bucket needs and leaves."""

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

from ..eager.signals import SIGNALS, runs
from ..engine.engine import Engine
from ..ledger.engine_lock import with_the_lock
from ..ledger.record import Record
from ..ledger.residency import Need
from ..step.program import Program
from . import host_step
from .buckets import Bucket, buckets_of, tensors_of
from .slices import in_slices, passes_over, slice_bytes
from .strategy import Strategy

log = logging.getLogger("teraio")

Member = tuple[torch.Tensor, Record | None]


class OptimizerCall:
    """From the first bucket to the end of the step."""

    def __init__(
        self, engine: Engine, optimizer: torch.optim.Optimizer, about: Strategy, closure: bool
    ) -> None:
        self.engine = engine
        self.optimizer = optimizer
        self.about = about
        self.program: Program | None = None
        self.buckets: list[Bucket] = []
        self.stepped: list[list[tuple[torch.Tensor, str]]] = []  # per bucket: parameters and their names
        self.members: list[list[Member]] = []
        self.gradients: set[int] = set()  # ids of those among them
        self.own_bytes: list[int] = []  # per bucket: what its update holds besides
        self.born_bytes: list[int] = []  # per bucket: states that it makes, as far as that is known
        self.visited: set[int] = set()
        self.current: int | None = None
        self.has_closure = closure
        self.closure = False  # it is yet to make gradients
        self.whole = False  # all at once: the user's hooks on the step have everything plain, too
        self.on_host: set[int] = set()  # buckets that are stepped there
        host, reason = host_step.of(engine), "its step has a closure" if closure else None
        self.host = host if host is not None and host.takes(optimizer, reason) else None

    # ---- the step's code goes through the groups

    def walk(self) -> Iterator[Bucket]:
        if self.program is None:
            self.begin(self._ways())
        for at, bucket in enumerate(self.buckets):
            if at in self.on_host:
                self._step_on_host(at)
                yield Bucket(bucket.group, [])
            else:
                self.open(at)
                yield from passes_over(self.optimizer, bucket)
        self.close()

    def _step_on_host(self, at: int) -> None:
        """Once, however often the step's code goes through the groups."""
        if at not in self.visited:
            assert self.host is not None
            self.open(at)
            with self._whole_or_torn(at, begun=len(self.visited) > 1):
                after = self.stepped[at + 1] if at + 1 in self.on_host else []
                both = ([parameter for parameter, _ in pairs] for pairs in (self.stepped[at], after))
                self.host.step(self.optimizer, self.buckets[at].group, *both)
            self.close()

    def _ways(self) -> Iterator[list[Bucket]]:
        """If several parameters at a time do not fit, each alone, and then in slices."""
        groups = self.optimizer.param_groups
        limit = self.about.bucket_bytes(self.engine.residency.budget_bytes)
        yield buckets_of(groups, limit)
        yield buckets_of(groups, 0)
        if self.about.goes_by_rows(self.optimizer):
            yield in_slices(groups, limit, self.optimizer.state)

    def run_whole(self) -> None:
        """All parameters of all groups are one bucket. A closure will make gradients of those that have none:
        and it runs programs, to which states and gradients are no arguments."""
        groups = self.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        self.closure, self.whole = self.has_closure, True
        if self.host is not None:
            self.host.takes(self.optimizer, "it steps all parameters at once")
            self.host = None
        self.begin([[Bucket({**(groups[0] if groups else {}), "foreach": True}, parameters)]])
        self.open(0)
        self.engine.user.eager_memory.begins()

    # ---- one call of the step

    @with_the_lock
    def begin(self, ways: Iterable[list[Bucket]]) -> None:
        """Cut into buckets in the first of these ways that fits."""
        engine = self.engine
        engine.user.eager_memory.ends()
        engine.end_step_of_eager(self.about.number)
        engine.unresizable.look()
        self._take_in_eager()
        need: Need | None = None
        for buckets in ways:
            self._gather(buckets)
            if (need := self._lacking()) is None:
                break
        if need is not None:
            engine.residency.give(need)
        self.program, bound = self._program()
        engine.tracker.enter(self.program)
        engine.expect()
        self.program.bound = bound
        try:
            engine.visit(self.program, 0, (), 0)
        except BaseException:
            engine.abandon()
            raise

    def _take_in_eager(self) -> None:
        """What is trained beside the weights of programs is a part of the same model."""
        groups = self.optimizer.param_groups
        count = sum(len(group["params"]) for group in groups)
        if count == self.about.met:
            return
        registry, records = self.engine.registry, self.engine.known_tensors.records
        named = {
            f"optimizer {self.about.number}.{place}.{at}": parameter
            for place, group in enumerate(groups)
            for at, parameter in enumerate(group["params"])
        }
        known = [p for p in named.values() if id(p) in records and records[id(p)].kind == "weight"]
        if known:
            self.about.met = count
            with DisableTorchFunctionSubclass():
                for name, parameter in named.items():
                    if parameter.device == known[0].device and parameter.layout == torch.strided:
                        registry.take_in_eager(parameter, name)

    def _program(self) -> tuple[Program, list[Record | None]]:
        """One slot per bucket; and the records of its buffers."""
        records = list(self._records().values())
        index = {record.key: position for position, record in enumerate(records)}
        touched = [
            tuple((index[r.key], flags) for r, flags in self._flags(at) if r.key in index)
            for at in range(len(self.members))
        ]
        facts = tuple([(record.name, record.size_bytes) for record in records])
        kernels = [
            self._kernel(members) + (" on the host" if at in self.on_host else "")
            for at, members in enumerate(self.members)
        ]
        key = (facts, *touched, *self.own_bytes, *kernels)
        program = self.about.program(key, lambda: schedule_of(facts, kernels, touched, self.own_bytes))
        return program, [*records]

    def _records(self) -> dict[int, Record]:
        """What can move of all buckets."""
        return _movable(member for at in range(len(self.members)) for member in self._here(at))

    def _here(self, at: int) -> list[Member]:
        """What is on the device when a bucket's turn comes: for a step on the host nothing."""
        return [] if at in self.on_host else self.members[at]

    def _flags(self, at: int) -> list[tuple[Record, int]]:
        """What a bucket's update does to each of its records."""
        found: dict[int, tuple[Record, int]] = {}
        scaled = getattr(self.optimizer, "grad_scale", None) is not None  # and divides by that, untold
        read_only = not (scaled or self.whole or self.about.seen.writes_gradients)
        for tensor, record in self._here(at):
            if record is not None:
                flags = READ if read_only and id(tensor) in self.gradients else READ | WRITE
                found[record.key] = record, found.get(record.key, (record, 0))[1] | flags
        return list(found.values())

    def _kernel(self, members: list[Member]) -> str:
        first = next((record.name for _, record in members if record is not None), "")
        return f"{type(self.optimizer).__name__}.step {first}".rstrip()

    def _lacking(self) -> Need | None:
        """What one of the buckets needs when all else is away, if that does not fit: to be known before the
        first of them is stepped."""
        residency = self.engine.residency
        residency.bury()
        for at, members in enumerate(self.members):
            kernel_bytes = sum(r.size_bytes for r in _movable(members).values()) + self._live_bytes(at)
            need = Need(residency.fixed_bytes, kernel_bytes, self._kernel(members))
            if residency.lacks(need):
                return need
        return None

    @with_the_lock
    def open(self, at: int) -> None:
        """All of the bucket is here and plain; the one before may leave."""
        self.close()
        engine, program, members = self.engine, self.program, self._here(at)
        assert program is not None
        running = engine.tracker.running
        with self._whole_or_torn(at, begun=bool(self.visited)):
            if at in self.visited or (running is not None and running.program is not program):
                engine.residency.serial += 1
                needed = [record for _, record in members if record is not None]
                engine.residency.ensure(needed, self._live_bytes(at), self._kernel(members), None)
                for record, flags in self._flags(at):
                    record.clean = record.clean and not flags & WRITE
            else:
                engine.visit(program, at + 1, (), self._live_bytes(at))
        if not self.visited:
            SIGNALS.begin(step_code(self.optimizer))
        self.visited.add(at)
        self.current = at
        tensors = [tensor for tensor, _ in members]
        if not self.closure:  # that runs programs: what has to leave for them is fetched when it is read
            engine.user.lend(tensors)

    @contextmanager
    def _whole_or_torn(self, at: int, begun: bool) -> Iterator[None]:
        """What goes wrong with the store when some buckets have been stepped leaves no whole step."""
        try:
            yield
        except BaseException as error:
            self.engine.abandon()
            if not isinstance(error, TeraioError) or not begun:
                raise
            self.engine.residency.torn, self.engine.residency.torn_is_known = error, True
            raise TornStepError(
                f"the step of {type(self.optimizer).__name__} ended after {at} of {len(self.buckets)} "
                f"buckets: {error}. Weights and states are those of no whole step: load the last checkpoint, "
                f"after teraio.reset()"
            ) from error

    @with_the_lock
    def close(self) -> None:
        """The bucket has been stepped: the states that were made for it are known from here on."""
        if self.current is None:
            return
        at, self.current = self.current, None
        known = {id(tensor) for tensor, _ in self.members[at]}
        self.members[at] += [
            (tensor, self.engine.registry.state(tensor, name))
            for parameter, base in self.stepped[at]
            for tensor, name in self._states(parameter, base)
            if id(tensor) not in known
        ]
        self.engine.known_tensors.notice_other_bytes([tensor for tensor, _ in self.members[at]])
        self.engine.user.take_back()

    @property
    def updates(self) -> bool:
        """Whether the optimizer's own update runs at this moment, on what is lent to it."""
        if self.current is None or self.closure:
            return False
        return runs(step_code(self.optimizer), inspect.currentframe())

    @with_the_lock
    def end(self) -> None:
        self.close()
        if self.program is not None:
            if any(self.born_bytes):  # so that the first step is like the others
                self._gather(self.buckets)
                self.program, bound = self._program()
                self.program.bound = bound
                self.engine.tracker.replace(self.program)
            self.engine.visit(self.program, self.program.last, (), 0)
        self.engine.optimizer_stepped()
        SIGNALS.end()

    # ---- what belongs to a bucket

    def _gather(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        with DisableTorchFunctionSubclass():
            self.stepped = [list(self._stepped(bucket, at)) for at, bucket in enumerate(buckets)]
            states = [[[*self._states(p, base)] for p, base in stepped] for stepped in self.stepped]
            self.gradients = {id(p.grad) for bucket in self.stepped for p, _ in bucket}
            self.engine.registry.adopt_states(pair for bucket in states for pairs in bucket for pair in pairs)
            self.members = [self._members(*both) for both in zip(self.stepped, states)]
            self.on_host = {at for at in range(len(buckets)) if self._goes_to_host(at)}
            self.born_bytes = [self._born_bytes(at) for at in range(len(buckets))]
            self.own_bytes = [self._own_bytes(at) for at in range(len(buckets))]

    def _goes_to_host(self, at: int) -> bool:
        bucket = self.buckets[at]
        if self.host is None or bucket.slices > 1 or not self.about.met:  # of a model that is not ours
            return False
        parameters = [parameter for parameter, _ in self.stepped[at]]
        kernel = self._kernel(self.members[at])
        return self.host.takes_bucket(kernel, self.optimizer, bucket.group, parameters)

    def _stepped(self, bucket: Bucket, at: int) -> Iterator[tuple[torch.Tensor, str]]:
        """The parameters that have gradients, with the names of their weights, or what they are called where
        no program knows them."""
        for place, parameter in enumerate(bucket.parameters):
            if parameter.grad is not None or self.closure:
                record = self.engine.known_tensors.records.get(id(parameter))
                record = record or self.engine.residency.records.get(parameter.untyped_storage()._cdata)
                yield (
                    parameter,
                    f"optimizer {self.about.number}.{at}.{place}" if record is None else record.name,
                )

    def _members(
        self, stepped: list[tuple[torch.Tensor, str]], states: list[list[tuple[torch.Tensor, str]]]
    ) -> list[Member]:
        """Its parameters, their gradients and states, with their records."""
        registry = self.engine.registry
        members: list[Member] = []
        for (parameter, base), pairs in zip(stepped, states):
            members.append((parameter, registry.count(parameter, base, "outside")))
            gradient = parameter.grad
            if gradient is not None:
                members.append((gradient, registry.count(gradient, f"{base}.grad", "grad")))
            members += [(tensor, registry.state(tensor, name)) for tensor, name in pairs]
        return members

    def _states(self, parameter: torch.Tensor, base: str) -> Iterator[tuple[torch.Tensor, str]]:
        for name, value in self.optimizer.state.get(parameter, {}).items():
            yield from tensors_of(value, f"{base}.{name}")

    def _live_bytes(self, at: int) -> int:
        return self.own_bytes[at] + self.born_bytes[at]

    def _born_bytes(self, at: int) -> int:
        """The states of parameters that have none yet."""
        without = [p.nbytes for p, _ in self.stepped[at] if not self.optimizer.state.get(p)]
        return int(self.about.seen.born * sum(without))

    def _own_bytes(self, at: int) -> int:
        if at in self.on_host:
            return 0
        seen, bucket = self.about.seen, self.buckets[at]
        own = own_bytes(bucket, [p.nbytes for p, _ in self.stepped[at]], seen.temporaries)
        if bucket.slices > 1 and self.born_bytes[at]:  # a slice's, before they are joined
            own += int(seen.born * slice_bytes(bucket))
        return own


def schedule_of(
    arguments: Sequence[tuple[str, int]],
    kernels: Sequence[str],
    touched: Sequence[Sequence[tuple[int, int]]],
    own_bytes: Sequence[int],
) -> Schedule:
    """A step over these tensors (name, size_bytes): per bucket its kernel, what that touches and how, and
    what it holds besides."""
    buffers = tuple(Buffer(name, "argument", size_bytes) for name, size_bytes in arguments)
    slots = [Slot("enter", tuple(range(len(buffers))), (0,) * len(buffers), 0)]
    for kernel, pairs, live_bytes in zip(kernels, touched, own_bytes):
        indices, flags = (tuple(pair[place] for pair in pairs) for place in (0, 1))
        slots.append(Slot(kernel, indices, flags, live_bytes))
    return Schedule("optimizer", buffers, (*slots, Slot("exit", (), (), 0)))


def own_bytes(bucket: Bucket, sizes: list[int], temporaries: float) -> int:
    """What the update of a bucket holds besides, given the bytes of its parameters. A loop over parameters
    holds one parameter's temporaries at a time, or those of one slice; fused kernels have none."""
    if not sizes or bucket.group.get("fused"):
        return 0
    if bucket.slices > 1:
        return int(temporaries * slice_bytes(bucket))
    loops = bucket.group.get("foreach") is False or (
        bucket.group.get("foreach", "") is None and bucket.parameters[0].device.type == "cpu"
    )
    return int(temporaries * (max(sizes) if loops else sum(sizes)))


def _movable(members: Iterable[Member]) -> dict[int, Record]:
    return {record.key: record for _, record in members if record is not None and record.evictable}


def step_code(optimizer: torch.optim.Optimizer) -> CodeType | None:
    """Of the function around `step` that calls the hooks: on the stack from the first hook to the last."""
    code: CodeType | None = getattr(getattr(type(optimizer), "step", None), "__code__", None)
    return code


def plainly_called(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook of the step was called by torch's own code around it, in a call that nobody compiles:
    neither is it what a compiler made of that code, nor does a compiler look at what that calls."""
    frame = inspect.currentframe()
    wrapper = step_code(optimizer)
    while frame is not None and not frame.f_code.co_filename.endswith("optim/optimizer.py"):
        frame = frame.f_back
    if frame is None or frame.f_code is not wrapper:
        return False
    while (frame := frame.f_back) is not None:
        if frame.f_code.co_filename.endswith("_dynamo/eval_frame.py"):
            return frame.f_code.co_name != "compile_wrapper"  # of those that switch the compiler on or off
    return True
