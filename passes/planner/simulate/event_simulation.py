"""What happens when a plan runs, moment by moment? In: plan, profile, machine. Out: times of steps, the peak.

Written from the meaning of a plan, slowly, and without the recurrence of `simulate`, which it judges. Compute
is a coroutine that goes from tick to tick:

    issue evictions -> wait for those that are free here -> their bytes go -> issue fetches: their bytes come
    -> wait for those that are ready here -> the kernel's new tensors and its workspace come -> it runs

Each link has a queue, and only its first transfer moves: for its latency it moves nothing, then bytes at the
link's rate. Links that share a bandwidth divide it: equally, but no link gets more than its own rate, and
what it leaves goes to the others. Where links share, this is right and the recurrence is optimistic.

Bytes are counted as they come and go. PlanError is raised when they exceed the plan's budget, when a kernel
runs without its tensors, and when one is written while it leaves. Inputs come with the step, before tick 0.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator
from dataclasses import dataclass
from itertools import count
from random import Random

from teraio.errors import PlanError
from teraio.formats.machine import Link, Machine
from teraio.formats.plan import Evict, Move, Plan
from teraio.formats.profile import Profile, Tensor

DEVICE = "device"
SECOND_NS = 1_000_000_000
STEPS_MOST = 24  # steps until we stop waiting for one that begins as an earlier one did


@dataclass(frozen=True, slots=True)
class Jitter:
    """Each run of a kernel and each transfer takes its time, plus or minus up to this share of it.

    `by_step`: they do not vary one by one, but all kernels of a step alike, and all transfers of a link in
    it: a clock that is throttled, a drive that is busy.
    """

    share: float
    seed: int = 0
    by_step: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """`step_ns`: the mean of the steps that repeat. `took_ns`: each step, from the first."""

    step_ns: int
    took_ns: tuple[int, ...]
    peak_bytes: int


@dataclass(slots=True, eq=False)
class _Flight:
    """A transfer that was issued: what is left of it, in ns of latency and in bytes times 10**9."""

    move: Move
    latency_ns: int
    work: int
    done: bool = False


def has_contended_links(machine: Machine) -> bool:
    """Whether links together can ask for more of a bandwidth than there is."""
    return any(
        sum(link.bandwidth_bytes_per_s for link in machine.links if link.shares == name) > bandwidth
        for name, bandwidth in machine.shared
    )


def simulate_by_events(
    plan: Plan, profile: Profile, machine: Machine, *, jitter: Jitter | None = None, steps: int = 0
) -> Outcome:
    """Run steps until they repeat, or so many. With jitter they never do: the mean of all but the first two.

    The plan is one that `check` accepts; here, too, one that breaks its promises is refused.
    """
    links = _Links(machine)
    device = _Device(plan, profile)
    compute = _yield_compute_waits(plan, profile, links, device, _JitterFactors(jitter))
    begun, took, started_ns = [links.transfers_left()], list[int](), 0
    steps = steps or STEPS_MOST
    for waits_for in compute:
        if isinstance(waits_for, _Flight):
            links.advance_until_done(waits_for)
        elif waits_for >= 0:
            links.advance_by_ns(waits_for)
        else:  # the end of a step
            links.advance_by_ns(0)
            took.append(links.now_ns - started_ns)
            started_ns = links.now_ns
            begun.append(links.transfers_left())
            if len(took) >= steps or (jitter is None and begun[-1] in begun[:-1]):
                break
    if jitter is not None:
        counted = took[2:] or took
    else:
        repeats = begun[-1] in begun[:-1]
        counted = took[-(begun[-2::-1].index(begun[-1]) + 1) :] if repeats else took[-max(steps // 2, 1) :]
    least = 0 if jitter else max(device.compute_ns, links.busiest_link_ns(plan, profile))
    return Outcome(max(-(-sum(counted) // len(counted)), least), tuple(took), device.peak_bytes)


def _yield_compute_waits(
    plan: Plan, profile: Profile, links: _Links, device: _Device, shake: _JitterFactors
) -> Generator[_Flight | int, None, None]:
    """Step after step. Yields what it waits for: a transfer, or so many ns, or -1 at the end of a step."""
    ticks = len(profile.kernels)
    starts, ends = defaultdict[int, list[Move]](list), defaultdict[int, list[Move]](list)
    for move in plan.moves:
        end = move.free if isinstance(move, Evict) else move.ready
        ends[end % ticks].append(move)
        if move.trigger is not None:
            starts[move.trigger % ticks].append(move)
    pending: dict[Move, _Flight] = {}

    for _ in count():
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
                for move in ends[tick]:
                    if isinstance(move, Evict) is evicts:
                        if move in pending:  # else it was issued before the first step, and is long done
                            yield pending.pop(move)
                        device.finish_move(move)
            device.allocate_for_kernel(tick)
            yield round(kernel.duration_ns * shake.draw_factor(COMPUTE))
            device.free_after_kernel(tick)
        yield -1


COMPUTE = ("compute", "")


class _JitterFactors:
    """By how much a kernel or a transfer takes longer now."""

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
    """Queues of transfers, and the time."""

    def __init__(self, machine: Machine) -> None:
        self.now_ns = 0
        self.of = {(link.source, link.target): link for link in machine.links}
        self.shared = dict(machine.shared)
        self.queues: dict[Link, deque[_Flight]] = {link: deque() for link in machine.links}

    def issue_transfer(self, move: Move, size_bytes: int, factor: float) -> _Flight:
        link = self.of[_link_ends_of_move(move)]
        work = size_bytes * SECOND_NS
        flight = (
            _Flight(move, link.latency_ns, work)
            if factor == 1
            else _Flight(move, round(link.latency_ns * factor), round(work * factor))
        )
        self.queues[link].append(flight)
        return flight

    def advance_by_ns(self, duration_ns: int) -> None:
        """Let this much time go by."""
        until_ns = self.now_ns + duration_ns
        self._dequeue_finished()
        while self.now_ns < until_ns:
            rates = self._rates_of_moving_links()
            self._advance_transfers(min([until_ns - self.now_ns, *self._ns_to_next_events(rates)]), rates)

    def advance_until_done(self, flight: _Flight) -> None:
        """Let time go by until a transfer is done."""
        self._dequeue_finished()
        while not flight.done:
            rates = self._rates_of_moving_links()
            self._advance_transfers(min(self._ns_to_next_events(rates)), rates)

    def transfers_left(self) -> list[list[tuple[Move, int, int]]]:
        """What is left to do on each link."""
        return [[(f.move, f.latency_ns, f.work) for f in queue] for queue in self.queues.values()]

    def busiest_link_ns(self, plan: Plan, profile: Profile) -> int:
        """What the busiest link carries in a step, one transfer after another at its own rate."""
        sizes = {tensor.name: tensor.size_bytes for tensor in profile.tensors}
        busy_ns = dict.fromkeys(self.of, 0)
        for move in plan.moves:
            if move.trigger is not None:
                link = self.of[_link_ends_of_move(move)]
                bytes_ns = -(-sizes[move.tensor] * SECOND_NS // link.bandwidth_bytes_per_s)
                busy_ns[_link_ends_of_move(move)] += link.latency_ns + bytes_ns
        return max(busy_ns.values(), default=0)

    def _rates_of_moving_links(self) -> dict[Link, int]:
        """Bytes per second of each link whose first transfer moves bytes now."""
        rates, sharing = dict[Link, int](), defaultdict[str, list[Link]](list)
        for link, queue in self.queues.items():
            if queue and not queue[0].latency_ns:
                rates[link] = link.bandwidth_bytes_per_s
                if link.shares is not None:
                    sharing[link.shares].append(link)
        for name, links in sharing.items():
            rest = self.shared[name]
            for index, link in enumerate(sorted(links, key=lambda each: each.bandwidth_bytes_per_s)):
                rates[link] = max(min(link.bandwidth_bytes_per_s, rest // (len(links) - index)), 1)
                rest = max(rest - rates[link], 0)
        return rates

    def _ns_to_next_events(self, rates: dict[Link, int]) -> list[int]:
        """In how many ns a first transfer's latency is over, or its bytes have moved."""
        return [
            queue[0].latency_ns or -(-queue[0].work // rates[link])
            for link, queue in self.queues.items()
            if queue
        ]

    def _advance_transfers(self, duration_ns: int, rates: dict[Link, int]) -> None:
        self.now_ns += duration_ns
        for link, queue in self.queues.items():
            if queue and queue[0].latency_ns:
                queue[0].latency_ns -= duration_ns
            elif queue:
                queue[0].work = max(queue[0].work - rates[link] * duration_ns, 0)
        self._dequeue_finished()

    def _dequeue_finished(self) -> None:
        """Transfers that are done leave their queues."""
        for queue in self.queues.values():
            while queue and not queue[0].latency_ns and not queue[0].work:
                queue.popleft().done = True


class _Device:
    """What is on the device, byte by byte."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self.plan, self.profile = plan, profile
        self.tensors = {tensor.name: tensor for tensor in profile.tensors}
        self.compute_ns = profile.compute_ns
        self.used: list[list[Tensor]] = [[] for _ in profile.kernels]
        self.last: dict[str, int] = {}
        for tensor in profile.tensors:
            for tick in sorted({*tensor.reads, *tensor.writes}):
                self.used[tick].append(tensor)
                self.last[tensor.name] = tick
        self.state: dict[str, str] = {}
        self.bytes = self.peak_bytes = 0
        for tensor in profile.tensors:
            if tensor.persistent:
                self.state[tensor.name] = "here"
        for home in plan.homes:
            if home.tier != DEVICE:
                self.state[home.tensor] = "away"
        for move in plan.moves:
            end = move.free if isinstance(move, Evict) else move.ready
            if move.trigger is not None and end % len(profile.kernels) < move.trigger % len(profile.kernels):
                self.state[move.tensor] = "leaving" if isinstance(move, Evict) else "arriving"
        for name, state in self.state.items():
            self.bytes += 0 if state == "away" else self.tensors[name].size_bytes

    def size_of_moved_tensor(self, move: Move) -> int:
        return self.tensors[move.tensor].size_bytes

    def add_step_inputs(self) -> None:
        for tensor in self.profile.tensors:
            if tensor.kind == "input" and not tensor.persistent and tensor.name in self.last:
                self.state[tensor.name] = "here"
                self.bytes += tensor.size_bytes

    def start_move(self, move: Move, tick: int) -> None:
        evicts = isinstance(move, Evict)
        self._change_state(move, "here" if evicts else "away", "leaving" if evicts else "arriving")
        if not evicts:
            self.bytes += self.size_of_moved_tensor(move)
            self._refuse_bytes_over_budget(tick, 0)

    def finish_move(self, move: Move) -> None:
        """A transfer that was waited for is done, or a copy is dropped."""
        if isinstance(move, Evict):
            self._change_state(move, "here" if move.trigger is None else "leaving", "away")
            self.bytes -= self.size_of_moved_tensor(move)
        else:
            self._change_state(move, "arriving", "here")

    def allocate_for_kernel(self, tick: int) -> None:
        kernel = self.profile.kernels[tick]
        for tensor in self.used[tick]:
            if tensor.name not in self.state:  # made here
                self.state[tensor.name] = "here"
                self.bytes += tensor.size_bytes
            state = self.state[tensor.name]
            if state not in ("here", "leaving"):
                raise PlanError(
                    f"kernel {kernel.name!r} (tick {tick}) uses {tensor.name!r}, which is {state}"
                )
            if state == "leaving" and tick in tensor.writes:
                raise PlanError(
                    f"kernel {kernel.name!r} (tick {tick}) writes {tensor.name!r} while it is leaving"
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
            raise PlanError(f"a move of {move.tensor!r} finds it {state}, not {before}")
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
