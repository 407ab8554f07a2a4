"""The place of each call in the step. The tracker finds this place: it compares the programs that run now
with the programs of earlier steps.

A call is one run of a program, and a step is a list of calls. A slot is a point in a program before a kernel.
A tick is the number of a slot in the whole step. An expectation describes an earlier step. The tracker keeps
one expectation for each order of programs. So evaluations, and steps with another shape of batch, have
expectations of their own.

A program is foreign if the expected step has another program at this place. The tensors of a foreign program
are fetched on demand. After the foreign program, the expected step continues at the same place.

A training step ends when optimizers have stepped and a program begins. Without an optimizer of torch, user
code updates the weights. The step then ends when its first program runs again after a backward, or when an
inference begins. A step of inference ends when its first program runs again, or when a training step begins.
There is one exception: a loop may run one inference before each training step, for example of a teacher
model. From the second time on, the inference counts as the beginning of the training step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from torch.optim import Optimizer

from teraio.formats.plan import Evict, Plan, Predicted
from teraio.formats.schedule import Call, Step

from ..device.clock import Clock, HostClock
from ..ledger.record import HOST
from .plan_table import Operation, Table, table_of
from .program import Program

EXPECTATIONS_MAX = 16
TOUCHES_MAX = 2**16  # at most this many touches are kept per call

TensorFacts = tuple[str, str, int, bool]  # name, kind, size_bytes, True if it outlives the step


class MeasuredCall:
    """A call of a program in a measured step: the moments at which each of its slots began and ended."""

    def __init__(self, program: Program) -> None:
        slots = len(program.schedule.slots)
        self.program = program
        self.stood: list[tuple[Any, Any] | None] = [None] * slots
        self.live_bytes = [0] * slots
        self.tensors: tuple[str, ...] = ()

    def note_tensor_names(self) -> None:
        """Save the names of this call's tensors, because the next call of the same program replaces them."""
        self.tensors = tuple(record.name if record else "" for record in self.program.bound)


def _timed_calls(measured: Sequence[MeasuredCall], ended: Any, clock: Clock) -> tuple[tuple[Call, ...], int]:
    """Return the calls of a measured step with the times of their slots. Also return the time of the step's
    end."""
    stood = [each for running in measured for each in running.stood if each is not None]
    times = clock.moments_in_ns([*(moment for each in stood for moment in each), ended])
    calls, at = [], 0
    for running in measured:
        at_ns, stall_ns = [], []
        for each in running.stood:
            began_ns, left_ns = times[at : at + 2] if each is not None else (0, 0)
            at += 2 if each is not None else 0
            at_ns.append(left_ns)
            stall_ns.append(left_ns - began_ns)
        live_bytes = tuple(running.live_bytes)
        schedule = running.program.schedule
        calls.append(Call(schedule, running.tensors, tuple(at_ns), live_bytes, tuple(stall_ns)))
    return tuple(calls), times[-1]


class Expectation:
    """A step that the engine expects: (1) its programs in order, (2) the uses of each tensor, (3) the plan
    for the step."""

    def __init__(self, programs: tuple[str, ...], lengths: tuple[int, ...]) -> None:
        self.programs = programs  # identities of the programs, in the order of their calls
        bases = [0]
        for length in lengths:
            bases.append(bases[-1] + length)
        self.base = bases[:-1]  # tick at which each call begins
        self.length = bases[-1]
        # Tensor name -> ticks of its uses, ascending. Uses by user code lie between two ticks.
        self.uses: dict[str, list[float]] = {}
        self.table: Table = {}  # the plan: tick -> operations
        self.late: dict[str, None] = {}  # the plan's fetches that found no room, in the plan's order
        self.to_host: Collection[str] = ()  # tensors that the plan evicts to host memory
        # Call -> number of bytes that user code took after the call, for tensors that the engine does not
        # know.
        self.outside: dict[int, int] = {}
        self.kept: dict[int, int] = {}  # call -> bytes that user code held when the call began
        self.touched: dict[int, tuple[str, ...]] = {}  # call -> tensors that user code touched after the call
        self.around: frozenset[str] = frozenset()  # gradients that live around the end of the step
        self.settled = False  # True: steps of this expectation are no longer measured
        self.planned = False
        self.predicted: Predicted | None = None  # the plan's prediction of the step

    def set_plan(self, plan: Plan | None, settle: bool = False) -> None:
        """Follow this plan in steps that match this expectation. If `plan` is None, keep the present plan.
        With `settle`, stop measuring such steps."""
        self.settled = self.settled or settle
        if plan is None:
            return
        self.table, self.late = table_of(plan, max(self.length, 1)), {}
        self.to_host = {move.tensor for move in plan.moves if isinstance(move, Evict) and move.to == HOST}
        self.planned, self.predicted = plan.planner != "none", plan.predicted

    def measure_again(self) -> None:
        """Measure the next step that matches this expectation."""
        self.settled = False

    def note_late_fetch(self, name: str) -> None:
        """Record a fetch of the plan that found no room."""
        self.late[name] = None

    def end_late_fetch(self, name: str) -> None:
        """Forget that this tensor's fetch was late, because the fetch has begun or is no longer needed."""
        self.late.pop(name, None)

    def operations_at(self, tick: int | None) -> Sequence[Operation]:
        """Return the plan's operations at this tick, which is the number of a slot in the step."""
        return self.table.get(tick, ()) if tick is not None else ()

    def has_moves_at(self, tick: int | None) -> bool:
        return tick is not None and (tick in self.table or bool(self.late))

    @property
    def phase(self) -> Literal["measuring", "planned", "on demand"]:
        return "planned" if self.planned else "on demand" if self.settled else "measuring"

    def learn_uses_from_step(self, step: Step) -> None:
        """Learn from a measured step the ticks at which each tensor is used."""
        uses: dict[str, list[float]] = {}
        for number, call in enumerate(step.calls):
            for index, slot in enumerate(call.schedule.slots, self.base[number]):
                for buffer, flags in zip(slot.buffers, slot.flags):
                    if flags and call.tensors[buffer]:
                        uses.setdefault(call.tensors[buffer], []).append(index)
            for index, name in enumerate(self.touched.get(number, ())):
                uses.setdefault(name, []).append(self.touch_tick(number, index))
        self.uses, self.around = uses, step.around

    def touch_tick(self, call: int, index: int) -> float:
        """Return the place of a touch (a use by user code) as a number between the call's last tick and the
        next tick."""
        end = self.base[call + 1] if call + 1 < len(self.base) else self.length
        return end - 1 + (index + 1) / (len(self.touched.get(call, ())) + 1)


class StepTracker:
    """The calls of the running step. Also the earlier steps, to which the tracker compares the running
    step."""

    def __init__(self, begins: Callable[[], None] = lambda: None, clock: Clock | None = None) -> None:
        self.begins = begins  # is called when a step begins
        self.clock = clock or HostClock()
        self.known: dict[tuple[str, ...], Expectation] = {}  # by order of programs; the latest is last
        self.expected = Expectation((), ())
        self.at = 0  # number of calls of the expected step that have begun
        self.base: int | None = None  # the tick of the running call's first slot; None: unknown
        self.number = 0  # number of the running call, within the step
        self.programs: list[Program] = []  # programs that ran so far in this step
        self.calls: list[MeasuredCall] = []  # calls of this step, if they were measured
        self.running: MeasuredCall | None = None
        self.outside: dict[int, int] = {}  # call of this step -> bytes that user code took after the call
        self.kept: dict[int, int] = {}  # Call of this step -> bytes that user code held when the call began.
        # Call of this step -> tensors that user code touched after the call.
        self.touched: dict[int, list[str]] = {}
        # True: an optimizer of torch exists. None: unknown, until the answer is needed.
        self.has_optimizer: bool | None = None
        self.foreign = False  # True: the running call is not part of the expected step
        self.first: Any = None  # the first program of the step, and one of its weights
        self.stepped: Any = None  # the moment of the last step of an optimizer in this training step
        self.training = False  # True: a program of this step has a backward or is a backward
        self.grad_mode = True  # True: grad mode was enabled when user code called the last program
        self.without_grad = False  # True: a program with weights was called under `no_grad` in this step
        # Steps of inference since the last training step, each as the order of its programs.
        self.inferred: list[tuple[str, ...]] = []
        # The programs of an inference before a training step, and the training step's first program.
        self.lead: tuple[str, ...] = ()

    @property
    def tick_count(self) -> int:
        return self.expected.length

    @property
    def call_label(self) -> str:
        """Return the number of the running call, as it occurs in names of tensors. It is the call's place in
        the step, without foreign programs. The number of a foreign program has an `x` before it."""
        if self.foreign:
            return f"x{self.number}"
        return str(self.number if self.base is None else self.at - 1)

    def is_step_over_before(self, program: Program, mark: Any) -> bool:
        """Return whether the step so far ends before this program.

        A training step ends if an optimizer has stepped. If there is no optimizer, it ends when its first
        program runs again after a backward, or when an inference begins. A step of inference ends when its
        first program runs again, or when a training step begins.
        """
        if self.stepped is not None:
            return True
        if not self.programs:
            return False
        if self.training:
            again = program.schedule.kind == "inference" or self.first == (program.own_identity, mark)
            return again and self.programs[-1].schedule.kind == "backward" and not self._find_optimizer()
        if program.schedule.kind != "forward":
            return self.first == (program.own_identity, mark)
        if not self.without_grad:
            # Grad mode was enabled. So the programs so far are the beginning of a training step, although
            # none of them has a backward.
            return False
        return (*(each.own_identity for each in self.programs), program.own_identity) != self.lead

    def _find_optimizer(self) -> bool:
        """Return True if an optimizer of torch exists. Search for one only at the first call."""
        if self.has_optimizer is None:
            self.has_optimizer = any(issubclass(type(each), Optimizer) for each in gc.get_objects())
        return self.has_optimizer

    def begin_call(self, program: Program, mark: Any = None) -> None:
        self._end_measured_call()
        self.number = len(self.programs)
        if not self.programs:
            self.first = (program.own_identity, mark)
            self.begins()
        self.programs.append(program)
        self.training |= program.schedule.kind != "inference"
        self.without_grad |= not self.grad_mode and mark is not None
        self.base = self._find_call_tick(program.identity)
        self.foreign = self.base is None and bool(self.known)
        settled = self.base is not None and self.expected.settled
        whole = len(self.calls) == self.number  # False: some calls of this step were not measured
        self.running = MeasuredCall(program) if whole and not settled else None

    def _find_call_tick(self, identity: str) -> int | None:
        """Return the tick of the running call's first slot. Return None if no known step continues with this
        program."""
        expected = self.expected
        if self.at < len(expected.programs) and expected.programs[self.at] == identity:
            self.at += 1
            return expected.base[self.at - 1]
        so_far = (*expected.programs[: self.at], identity)
        for other in reversed(self.known.values()):
            if other.programs[: len(so_far)] == so_far:
                self.expected = other
                self.at = len(so_far)
                return other.base[self.at - 1]
        return None

    def replace_running_program(self, program: Program) -> None:
        """Replace the running call's program by another program with the same slots and more tensors."""
        self.programs[-1] = program
        if self.running is not None:
            self.running.program = program

    def tick_of_slot(self, index: int) -> int | None:
        """Return the tick of this slot, or None if the step does not follow a known step."""
        return None if self.base is None else self.base + index

    def note_slot_measure(self, index: int, began: Any, left: Any, live_bytes: int) -> None:
        """Record the moments at which this slot began and ended, and the bytes that could not be evicted
        then."""
        running = self.running
        assert running is not None
        running.stood[index] = began, left
        running.live_bytes[index] = live_bytes

    def add_measured_bytes(self, index: int, more_bytes: int) -> None:
        """Add bytes that the kernel of this slot took in addition to its known workspace."""
        if self.running is not None:
            self.running.live_bytes[index] += more_bytes

    def _end_measured_call(self) -> None:
        if self.running is not None:
            self.running.note_tensor_names()
            self.calls.append(self.running)
            self.running = None

    def note_optimizer_step(self, moment: Any) -> None:
        """Record the moment at which an optimizer stepped."""
        self.stepped, self.has_optimizer = moment, True

    def note_end_without_optimizer(self, moment: Any) -> None:
        """Record the moment at which a step ended in which no optimizer stepped."""
        self.stepped = moment

    def note_grad_mode(self, enabled: bool) -> None:
        """Record whether grad mode is enabled in the user code that calls the next program."""
        self.grad_mode = enabled

    def note_touch(self, name: str) -> None:
        """Record that user code touched this tensor after the last call."""
        seen = self.touched.setdefault(self.number, [])
        if len(seen) < TOUCHES_MAX:
            seen.append(name)

    def note_outside_bytes(self, call: int, size_bytes: int) -> None:
        """Record the number of bytes that user code took after this call."""
        self.outside[call] = size_bytes

    def note_kept_bytes(self, call: int, size_bytes: int) -> None:
        """Record the number of bytes that user code held when this call began."""
        self.kept[call] = size_bytes

    def forget_step(self) -> None:
        """Forget the running step, because it has too many calls. Also forget its expectation."""
        self.programs, self.calls, self.running, self.training = [], [], None, False
        self.without_grad = False
        self.inferred, self.lead = [], ()
        self.outside, self.kept, self.touched = {}, {}, {}
        self.expected, self.at, self.base = Expectation((), ()), 0, None

    def expectation_of(self, order: tuple[str, ...]) -> Expectation:
        """Return the expectation (facts about earlier steps) for steps that run the programs in `order`. If
        `order` is empty, return the expectation of the running step.

        If the tracker has forgotten such steps, return a new expectation, which no step uses.
        """
        return (self.known.get(order) or Expectation((), ())) if order else self.expected

    def request_measuring(self, order: tuple[str, ...]) -> None:
        """Measure the next step that runs the programs in `order`."""
        self.expectation_of(order).measure_again()

    def abandon_call(self) -> None:
        """Forget the running call, because an exception ended it. For the rest of the step, no known step is
        expected."""
        if self.programs:
            self.programs.pop()
        self.running = None
        self.base = None
        self.at = len(self.expected.programs)

    def _note_leading_inference(self, order: tuple[str, ...], training: bool) -> None:
        """Record the programs of the inference before this training step, if exactly one inference ran before
        it. From now on, this inference counts as the beginning of the training step."""
        if not training:
            self.inferred = [*self.inferred[-1:], order]
            return
        if not self.lead or order[: len(self.lead)] != self.lead:
            self.lead = (*self.inferred[0], order[0]) if len(self.inferred) == 1 else ()
        self.inferred = []

    def finish(
        self,
        describe: Callable[[str], tuple[str, str, int, bool] | None],
        exposed: frozenset[tuple[int, str]],
        around: frozenset[str] = frozenset(),
    ) -> Step | None:
        """End the step, and expect that the next step runs the same programs. Return the step if all of its
        calls were measured, otherwise None. `around` has the gradients that live around its end."""
        self._end_measured_call()
        ended, self.stepped = self.stepped, None
        programs, self.programs = self.programs, []
        measured, self.calls = self.calls, []
        outside, self.outside = self.outside, {}
        kept, self.kept = self.kept, {}
        touched, self.touched = self.touched, {}
        training, self.training = self.training, False
        self.at, self.base, self.foreign = 0, None, False
        self.without_grad = False
        if not programs:
            return None
        order = tuple(program.identity for program in programs)
        self._note_leading_inference(tuple(program.own_identity for program in programs), training)
        lengths = tuple(len(program.schedule.slots) for program in programs)
        self.expected = self.known.pop(order) if order in self.known else Expectation(order, lengths)
        self.known[order] = self.expected
        self.expected.outside.update(outside)
        self.expected.kept.update(kept)
        self.expected.touched = {call: tuple(names) for call, names in touched.items()}
        while len(self.known) > EXPECTATIONS_MAX:
            del self.known[next(iter(self.known))]
        if len(measured) < len(programs):
            return None
        calls, ended_ns = _timed_calls(measured, ended or self.clock.moment_after_kernels(), self.clock)
        names = {name for call in calls for name in call.tensors if name}
        kinds = tuple(sorted(k for name in names if (k := describe(name)) is not None))
        taken = tuple(self.expected.outside.get(call, 0) for call in range(len(calls)))
        return Step(calls, ended_ns, kinds, exposed, taken, around)
