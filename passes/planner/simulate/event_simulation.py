"""An event simulation of a plan. In: a plan, a profile, a machine. Out: times, stalls, the memory peak.

This module follows the definition of a plan and shares no code with the native recurrence. Tests compare the
two simulators. Compute is a coroutine that runs tick by tick:

    issue evictions -> wait for the evictions whose `free` is this tick, subtract their bytes
    -> issue fetches, add their bytes -> wait for the fetches whose `ready` is this tick
    -> add the kernel's new tensors and its workspace -> run the kernel

Each link has a queue, and only the first transfer of the queue is in progress. This transfer moves nothing
during its latency, and then bytes at the link's rate. Links that share a bandwidth divide it equally, but no
link gets more than its own rate. If a link needs less than its equal part, the other links divide the rest.

The simulation counts the bytes on the device. A step's inputs count from its start. The simulation raises
PlanError in three cases:

    - the bytes exceed the plan's budget
    - a kernel uses a tensor that is not resident; the simulation makes no fetch that the plan does not have
    - a kernel writes a tensor during the tensor's eviction
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import count
from random import Random

from teraio.errors import PlanError
from teraio.formats.machine import Machine
from teraio.formats.plan import Evict, Move, Plan
from teraio.formats.profile import Profile, Tensor
from teraio.formats.timeline import Span, Stall

DEVICE = "device"
SECOND_NS = 1_000_000_000
STEPS_MOST = 24  # limit of simulated steps, if the steps do not begin to repeat


@dataclass(frozen=True, slots=True)
class Jitter:
    """A random change of the times of kernels and transfers.

    Each kernel and each transfer takes longer or shorter by at most the fraction `share`. If `by_step` is
    True, all kernels of a step change by one common factor, as with a throttled clock. The transfers of each
    link change by a second common factor in each step, as with a busy drive.
    """

    share: float
    seed: int = 0
    by_step: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a simulation.

    `step_ns` is the mean duration of the steps that repeat. `took_ns` has the durations of all simulated
    steps. `spans` and `stalls` describe the last step. The times of spans count from the start of this step.
    Spans are in the order of their issue. A span may end after the step.
    """

    step_ns: int
    took_ns: tuple[int, ...]
    peak_bytes: int
    spans: tuple[Span, ...] = field(default=(), compare=False, repr=False)
    stalls: tuple[Stall, ...] = field(default=(), compare=False, repr=False)


@dataclass(slots=True, eq=False)
class _Flight:
    """An issued transfer. `latency_ns` and `work` shrink until both are 0.

    `work` has the remaining bytes times 10**9, because rates are in bytes/s and times in ns.
    """

    move: Move
    size_bytes: int
    latency_ns: int
    work: int
    start_ns: int = 0
    end_ns: int = -1  # -1 until the transfer is done
    queued: bool = False  # True if the link was busy when the transfer was issued

    def as_span(self, origin_ns: int) -> Span:
        move = self.move
        track = f"evict:{move.to}" if isinstance(move, Evict) else f"fetch:{move.source}"
        times = self.start_ns - origin_ns, self.end_ns - origin_ns
        return Span(track, move.tensor, *times, self.size_bytes, move.tensor)


@dataclass(slots=True, eq=False)
class _StepRecord:
    """The kernels and transfers of a step, in the order of their issue, and the step's stalls."""

    start_ns: int
    issued: list[_Flight | Span] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)

    def add_stall(self, tick: int, flight: _Flight, stall_ns: int) -> None:
        """Record that compute waited for this transfer, if the wait took time.

        The cause is `link busy` for every eviction, and for a fetch that was issued while the link was busy.
        For any other fetch the cause is `late read`.
        """
        if stall_ns:
            cause = "link busy" if flight.queued or isinstance(flight.move, Evict) else "late read"
            self.stalls.append(Stall(tick, flight.move.tensor, stall_ns, cause))


def simulate_by_events(
    plan: Plan, profile: Profile, machine: Machine, *, jitter: Jitter | None = None, steps: int = 0
) -> Outcome:
    """Simulate steps until they repeat. If `steps` is not 0, simulate at most this number of steps.

    With jitter, `step_ns` is the mean of all steps except the first two. Callers have checked the plan with
    plan_check. For an invalid plan, this function also raises PlanError.
    """
    links = _Links(machine)
    device = _Device(plan, profile)
    compute = _yield_compute_waits(plan, profile, links, device, _JitterFactors(jitter))
    begun, took, step = [links.transfers_left()], list[int](), _StepRecord(0)
    steps = steps or STEPS_MOST
    for waits_for in compute:
        links.advance(waits_for)
        if isinstance(waits_for, _StepRecord):
            step = waits_for
            took.append(links.now_ns - step.start_ns)
            begun.append(links.transfers_left())
            if len(took) >= steps or (jitter is None and begun[-1] in begun[:-1]):
                break
    in_flight = [each for each in step.issued if isinstance(each, _Flight) and each.end_ns < 0]
    while any(flight.end_ns < 0 for flight in in_flight):  # run the next step until these transfers are done
        links.advance(next(compute))
    if jitter is not None:
        counted = took[2:] or took
    else:
        repeats = begun[-1] in begun[:-1]
        counted = took[-(begun[-2::-1].index(begun[-1]) + 1) :] if repeats else took[-max(steps // 2, 1) :]
    least = 0 if jitter else max(device.compute_ns, links.busiest_link_ns(plan, profile))
    spans = (each if isinstance(each, Span) else each.as_span(step.start_ns) for each in step.issued)
    return Outcome(
        max(-(-sum(counted) // len(counted)), least),
        tuple(took),
        device.peak_bytes,
        tuple(spans),
        tuple(step.stalls),
    )


def _yield_compute_waits(
    plan: Plan, profile: Profile, links: _Links, device: _Device, shake: _JitterFactors
) -> Generator[_Flight | int | _StepRecord, None, None]:
    """Run step after step, without end.

    Yield a transfer to wait for its end, and a number of ns to let this time pass. After each step yield the
    step's record.
    """
    ticks = len(profile.kernels)
    starts, ends = defaultdict[int, list[Move]](list), defaultdict[int, list[Move]](list)
    for move in plan.moves:
        end = move.free if isinstance(move, Evict) else move.ready
        ends[end % ticks].append(move)
        if move.trigger is not None:
            starts[move.trigger % ticks].append(move)
    pending: dict[Move, _Flight] = {}

    for _ in count():
        step = _StepRecord(links.now_ns)
        device.add_step_inputs()
        shake.forget_step_factors()
        for tick, kernel in enumerate(profile.kernels):
            for evicts in (True, False):
                for move in starts[tick]:
                    if isinstance(move, Evict) is evicts:
                        device.start_move(move, tick)
                        pending[move] = links.issue_transfer(
                            move,
                            device.size_of_moved_tensor(move),
                            shake.draw_factor(_link_ends_of_move(move)),
                        )
                        step.issued.append(pending[move])
                for move in ends[tick]:
                    if isinstance(move, Evict) is evicts:
                        if move in pending:  # otherwise: a drop, or issued before the first step
                            before_ns, flight = links.now_ns, pending.pop(move)
                            yield flight
                            step.add_stall(tick, flight, links.now_ns - before_ns)
                        device.finish_move(move)
            device.allocate_for_kernel(tick)
            duration_ns = round(kernel.duration_ns * shake.draw_factor(COMPUTE))
            start_ns = links.now_ns - step.start_ns
            step.issued.append(Span("compute", kernel.name, start_ns, start_ns + duration_ns))
            yield duration_ns
            device.free_after_kernel(tick)
        yield step


COMPUTE = ("compute", "")


class _JitterFactors:
    """The factors that lengthen or shorten the times of kernels and transfers."""

    def __init__(self, jitter: Jitter | None) -> None:
        self.jitter = jitter
        self.random = Random(jitter.seed if jitter else 0)
        self.of_step: dict[tuple[str, str], float] = {}

    def forget_step_factors(self) -> None:
        self.of_step.clear()

    def draw_factor(self, track: tuple[str, str]) -> float:
        if self.jitter is None:
            return 1
        drawn = 1 + self.random.uniform(-self.jitter.share, self.jitter.share)
        return self.of_step.setdefault(track, drawn) if self.jitter.by_step else drawn


class _Links:
    """The queue of transfers of each link, and the current time of the simulation."""

    def __init__(self, machine: Machine) -> None:
        self.now_ns = 0
        self.shared = dict(machine.shared)
        self.queues = {(link.source, link.target): (link, deque[_Flight]()) for link in machine.links}

    def issue_transfer(self, move: Move, size_bytes: int, factor: float) -> _Flight:
        link, queue = self.queues[_link_ends_of_move(move)]
        latency_ns, work = link.latency_ns, size_bytes * SECOND_NS
        if factor != 1:
            latency_ns, work = round(latency_ns * factor), round(work * factor)
        self._dequeue_finished()
        flight = _Flight(move, size_bytes, latency_ns, work, self.now_ns, queued=bool(queue))
        queue.append(flight)
        return flight

    def advance(self, waits_for: _Flight | int | _StepRecord) -> None:
        """Advance the time until a transfer is done, or by a number of ns.

        Do nothing for a step's record, because the end of a step takes no time.
        """
        self._dequeue_finished()
        if isinstance(waits_for, _Flight):
            while waits_for.end_ns < 0:
                rates = self._rates_of_moving_links()
                self._advance_transfers(min(self._ns_to_next_events(rates)), rates)
        elif isinstance(waits_for, int):
            until_ns = self.now_ns + waits_for
            while self.now_ns < until_ns:
                rates = self._rates_of_moving_links()
                self._advance_transfers(min([until_ns - self.now_ns, *self._ns_to_next_events(rates)]), rates)

    def transfers_left(self) -> list[list[tuple[Move, int, int]]]:
        """Return, for each link, its unfinished transfers with their remaining latency and work."""
        return [[(f.move, f.latency_ns, f.work) for f in queue] for _, queue in self.queues.values()]

    def busiest_link_ns(self, plan: Plan, profile: Profile) -> int:
        """Return the time for which a step's transfers occupy the busiest link, at the link's own rate."""
        sizes = {tensor.name: tensor.size_bytes for tensor in profile.tensors}
        busy_ns = dict.fromkeys(self.queues, 0)
        for move in plan.moves:
            if move.trigger is not None:
                link, _ = self.queues[_link_ends_of_move(move)]
                bytes_ns = -(-sizes[move.tensor] * SECOND_NS // link.bandwidth_bytes_per_s)
                busy_ns[_link_ends_of_move(move)] += link.latency_ns + bytes_ns
        return max(busy_ns.values(), default=0)

    def _rates_of_moving_links(self) -> list[int]:
        """Return each link's current rate in bytes/s.

        The rate is 0 if the link has no transfer, or if its first transfer is still within its latency.
        """
        rates, sharing = [0] * len(self.queues), defaultdict[str, list[int]](list)
        for index, (link, queue) in enumerate(self.queues.values()):
            if queue and not queue[0].latency_ns:
                rates[index] = link.bandwidth_bytes_per_s
                if link.shares is not None:
                    sharing[link.shares].append(index)
        for name, indices in sharing.items():
            rest = self.shared[name]
            for place, index in enumerate(sorted(indices, key=rates.__getitem__)):
                rates[index] = max(min(rates[index], rest // (len(indices) - place)), 1)
                rest = max(rest - rates[index], 0)
        return rates

    def _ns_to_next_events(self, rates: list[int]) -> list[int]:
        """Return, for each busy link, the ns until the first transfer's latency or bytes end."""
        return [
            queue[0].latency_ns or -(-queue[0].work // rate)
            for rate, (_, queue) in zip(rates, self.queues.values(), strict=True)
            if queue
        ]

    def _advance_transfers(self, duration_ns: int, rates: list[int]) -> None:
        self.now_ns += duration_ns
        for rate, (_, queue) in zip(rates, self.queues.values(), strict=True):
            if queue and queue[0].latency_ns:
                queue[0].latency_ns -= duration_ns
            elif queue:
                queue[0].work = max(queue[0].work - rate * duration_ns, 0)
        self._dequeue_finished()

    def _dequeue_finished(self) -> None:
        """Remove finished transfers from their queues."""
        for _, queue in self.queues.values():
            while queue and not queue[0].latency_ns and not queue[0].work:
                queue.popleft().end_ns = self.now_ns
                if queue:
                    queue[0].start_ns = self.now_ns


class _Device:
    """The simulated device: the state of each tensor, and the number of bytes on the device."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self.plan, self.profile = plan, profile
        self.tensors = {tensor.name: tensor for tensor in profile.tensors}
        self.compute_ns = profile.compute_ns
        self.used: list[list[Tensor]] = [[] for _ in profile.kernels]
        self.last: dict[str, int] = {}
        for tensor in profile.tensors:
            for tick in tensor.uses_in_order(len(profile.kernels)):
                self.used[tick % len(profile.kernels)].append(tensor)
                self.last[tensor.name] = tick % len(profile.kernels)
        self.state: dict[str, str] = {}
        self.bytes = self.peak_bytes = 0
        for tensor in profile.tensors:
            if tensor.outlives_step:
                self.state[tensor.name] = "resident"
        for home in plan.homes:
            if home.tier != DEVICE:
                self.state[home.tensor] = "evicted"
        for move in plan.moves:
            end = move.free if isinstance(move, Evict) else move.ready
            if move.trigger is not None and end % len(profile.kernels) < move.trigger % len(profile.kernels):
                self.state[move.tensor] = "being evicted" if isinstance(move, Evict) else "being fetched"
        for name, state in self.state.items():
            self.bytes += 0 if state == "evicted" else self.tensors[name].size_bytes

    def size_of_moved_tensor(self, move: Move) -> int:
        return self.tensors[move.tensor].size_bytes

    def add_step_inputs(self) -> None:
        for tensor in self.profile.tensors:
            if tensor.kind == "input" and not tensor.persistent and tensor.name in self.last:
                self.state[tensor.name] = "resident"
                self.bytes += tensor.size_bytes

    def start_move(self, move: Move, tick: int) -> None:
        evicts = isinstance(move, Evict)
        if evicts:
            self._change_state(move, "resident", "being evicted")
        else:
            self._change_state(move, "evicted", "being fetched")
            self.bytes += self.size_of_moved_tensor(move)
            self._refuse_bytes_over_budget(tick, 0)

    def finish_move(self, move: Move) -> None:
        """Change the tensor's state, because the move's transfer is done, or because the move is a drop."""
        if isinstance(move, Evict):
            self._change_state(move, "resident" if move.trigger is None else "being evicted", "evicted")
            self.bytes -= self.size_of_moved_tensor(move)
        else:
            self._change_state(move, "being fetched", "resident")

    def allocate_for_kernel(self, tick: int) -> None:
        kernel = self.profile.kernels[tick]
        for tensor in self.used[tick]:
            if tensor.name not in self.state:  # this kernel makes the tensor
                self.state[tensor.name] = "resident"
                self.bytes += tensor.size_bytes
            state = self.state[tensor.name]
            if state not in ("resident", "being evicted"):
                raise PlanError(
                    f"kernel {kernel.name!r} (tick {tick}) uses {tensor.name!r}, which is {state}"
                )
            if state == "being evicted" and tick in tensor.writes:
                raise PlanError(
                    f"kernel {kernel.name!r} (tick {tick}) writes {tensor.name!r} during its eviction"
                )
        self._refuse_bytes_over_budget(tick, kernel.workspace_bytes)

    def free_after_kernel(self, tick: int) -> None:
        for tensor in self.used[tick]:
            if not tensor.persistent and self.last[tensor.name] == tick:
                self.bytes -= tensor.size_bytes
                del self.state[tensor.name]

    def _change_state(self, move: Move, before: str, after: str) -> None:
        state = self.state.get(move.tensor, "not yet made")
        if state != before:
            raise PlanError(f"a move needs {move.tensor!r} to be {before}, but it is {state}")
        self.state[move.tensor] = after

    def _refuse_bytes_over_budget(self, tick: int, workspace_bytes: int) -> None:
        present = self.bytes + workspace_bytes
        self.peak_bytes = max(self.peak_bytes, present)
        if present > self.plan.budget_bytes:
            raise PlanError(
                f"{present} bytes are on the device at {self._kernel_label(tick)};"
                f" the plan's budget is {self.plan.budget_bytes}"
            )

    def _kernel_label(self, tick: int) -> str:
        return f"kernel {self.profile.kernels[tick].name!r} (tick {tick})"


def _link_ends_of_move(move: Move) -> tuple[str, str]:
    return (DEVICE, move.to) if isinstance(move, Evict) else (move.source, DEVICE)
