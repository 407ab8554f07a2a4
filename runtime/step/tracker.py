"""Which call of the step is this? The tracker compares the programs that run with those of earlier steps.

A step is a list of calls; a tick is a slot's place in the whole step. Several expectations are kept: one per
order of programs that a step had (another shape of batch, an evaluation). A program that the expected step
does not have at this place is foreign: it runs on demand, and the step goes on where it was. A step is over
when optimizers have stepped and a program comes; among programs of inference, when the first comes again or
a training step begins. A loop may run the same inference before each training step, once, as a teacher does:
from the second time on that inference is the beginning of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from teraio.formats.plan import Evict, Plan, Predicted
from teraio.formats.schedule import Call, Step

from ..device.clock import Clock, HostClock
from ..ledger.record import HOST
from .plan_table import Table, table_of
from .program import Program

EXPECTATIONS_MAX = 8

TensorFacts = tuple[str, str, int, bool]  # name, kind, size_bytes, persistent


class MeasuredCall:
    """A call, as it is measured: between which moments it stood at each slot."""

    def __init__(self, program: Program) -> None:
        slots = len(program.schedule.slots)
        self.program = program
        self.stood: list[tuple[Any, Any] | None] = [None] * slots
        self.live_bytes = [0] * slots
        self.tensors: tuple[str, ...] = ()

    def note_tensor_names(self) -> None:
        """Its program may be called again: who its buffers were is kept here."""
        self.tensors = tuple(record.name if record else "" for record in self.program.bound)


def _timed_calls(measured: Sequence[MeasuredCall], ended: Any, clock: Clock) -> tuple[tuple[Call, ...], int]:
    """What the clock says of a whole step: its calls, and when it was over."""
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
    """A step as it was: its programs in order, when each tensor is used in it, and the plan for it."""

    def __init__(self, programs: tuple[str, ...], lengths: tuple[int, ...]) -> None:
        self.programs = programs  # identities, in order
        bases = [0]
        for length in lengths:
            bases.append(bases[-1] + length)
        self.base = bases[:-1]  # tick at which each call begins
        self.length = bases[-1]
        self.uses: dict[str, list[float]] = {}  # name -> ticks, ascending; of touches in between
        self.table: Table = {}  # the plan: tick -> operations
        self.late: dict[str, None] = {}  # its fetches that did not fit yet, in its order
        self.to_host: Collection[str] = ()  # what the plan has in host memory for a while
        self.outside: dict[int, int] = {}  # call -> bytes that user code took after it, beside the ledger's
        self.kept: dict[int, int] = {}  # call -> bytes of user code that were there when it began
        self.touched: dict[int, tuple[str, ...]] = {}  # call -> what user code touched after it, in order
        self.settled = False  # it needs no more measuring
        self.planned = False
        self.predicted: Predicted | None = None  # by its plan

    def set_plan(self, plan: Plan) -> None:
        """Have the steps to come follow this plan."""
        self.table, self.late = table_of(plan, max(self.length, 1)), {}
        self.to_host = {move.tensor for move in plan.moves if isinstance(move, Evict) and move.to == HOST}
        self.planned, self.predicted = plan.planner != "none", plan.predicted

    def has_moves_at(self, tick: int | None) -> bool:
        return tick is not None and (tick in self.table or bool(self.late))

    @property
    def phase(self) -> Literal["measuring", "planned", "on demand"]:
        return "planned" if self.planned else "on demand" if self.settled else "measuring"

    def learn_uses_from_step(self, step: Step) -> None:
        """When each tensor was used in such a step."""
        uses: dict[str, list[float]] = {}
        for number, call in enumerate(step.calls):
            for index, slot in enumerate(call.schedule.slots, self.base[number]):
                for buffer, flags in zip(slot.buffers, slot.flags):
                    if flags and call.tensors[buffer]:
                        uses.setdefault(call.tensors[buffer], []).append(index)
            for index, name in enumerate(self.touched.get(number, ())):
                uses.setdefault(name, []).append(self.touch_tick(number, index))
        self.uses = uses

    def touch_tick(self, call: int, index: int) -> float:
        """When user code makes this touch after that call: after its last tick and before the next."""
        end = self.base[call + 1] if call + 1 < len(self.base) else self.length
        return end - 1 + (index + 1) / (len(self.touched.get(call, ())) + 1)


class StepTracker:
    def __init__(self, begins: Callable[[], None] = lambda: None, clock: Clock | None = None) -> None:
        self.begins = begins  # is told when the first call of a step is entered
        self.clock = clock or HostClock()
        self.known: dict[tuple[str, ...], Expectation] = {}  # the most recent is the last
        self.expected = Expectation((), ())
        self.at = 0  # calls of the expected step that have begun
        self.base: int | None = None  # the tick of the running call's first slot
        self.number = 0  # of the call that runs, within the step
        self.programs: list[Program] = []  # that ran so far in this step
        self.calls: list[MeasuredCall] = []  # as far as they were measured
        self.running: MeasuredCall | None = None
        self.outside: dict[int, int] = {}  # of this step, as in Expectation
        self.kept: dict[int, int] = {}  # likewise
        self.touched: dict[int, list[str]] = {}
        self.foreign = False  # the running call is no part of the expected step
        self.first: Any = None  # what the step began with
        self.stepped: Any = None  # the moment when an optimizer last did in this step
        self.training = False  # a program of this step will have a backward, or is one
        self.grad_mode = True  # of user code when Dynamo last looked for a program
        self.without_grad = False  # a program of this step, one with weights, was called in `no_grad`
        self.inferred: list[tuple[str, ...]] = []  # orders of the steps since the last training step
        self.lead: tuple[str, ...] = ()  # programs before the last training step, and its first

    @property
    def tick_count(self) -> int:
        return self.expected.length

    @property
    def call_label(self) -> str:
        """The running call in the names of what it makes: its place in the step, whatever foreign ran."""
        if self.foreign:
            return f"x{self.number}"
        return str(self.number if self.base is None else self.at - 1)

    def is_step_over_before(self, program: Program, mark: Any) -> bool:
        """Whether the step so far ends before this program: an optimizer has stepped, or there was nothing
        but inference, and it comes round again or a training step begins."""
        if self.stepped is not None:
            return True
        if self.training or not self.programs:
            return False
        if program.schedule.kind != "forward":
            return self.first == (program.identity, mark)
        if not self.without_grad:
            return False  # programs that train nothing come first in this step, and gradients were wanted
        return (*(each.identity for each in self.programs), program.identity) != self.lead

    def begin_call(self, program: Program, mark: Any = None) -> None:
        self._end_measured_call()
        self.number = len(self.programs)
        if not self.programs:
            self.first = (program.identity, mark)
            self.begins()
        self.programs.append(program)
        self.training |= program.schedule.kind != "inference"
        self.without_grad |= not self.grad_mode and mark is not None
        self.base = self._find_call_tick(program.identity)
        self.foreign = self.base is None and bool(self.known)
        settled = self.base is not None and self.expected.settled
        whole = len(self.calls) == self.number  # else no step can be made of them
        self.running = MeasuredCall(program) if whole and not settled else None

    def _find_call_tick(self, identity: str) -> int | None:
        """The tick of this call's first slot, if the step is one that is known."""
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
        """What the running call turned out to be: with the same slots, but it knows more tensors."""
        self.programs[-1] = program
        if self.running is not None:
            self.running.program = program

    def tick_of_slot(self, index: int) -> int | None:
        """The tick of this slot, or None where the step does not follow one that is known."""
        return None if self.base is None else self.base + index

    def note_slot_measure(self, index: int, began: Any, left: Any, live_bytes: int) -> None:
        running = self.running
        assert running is not None
        running.stood[index] = began, left
        running.live_bytes[index] = live_bytes

    def add_measured_bytes(self, index: int, more_bytes: int) -> None:
        """The kernel of this slot was seen to take more than was counted on."""
        if self.running is not None:
            self.running.live_bytes[index] += more_bytes

    def _end_measured_call(self) -> None:
        if self.running is not None:
            self.running.note_tensor_names()
            self.calls.append(self.running)
            self.running = None

    def forget_step(self) -> None:
        """The step has become too long to be one: what it was so far is forgotten, and what was expected."""
        self.programs, self.calls, self.running, self.training = [], [], None, False
        self.without_grad = False
        self.inferred, self.lead = [], ()
        self.outside, self.kept, self.touched = {}, {}, {}
        self.expected, self.at, self.base = Expectation((), ()), 0, None

    def expectation_of(self, order: tuple[str, ...]) -> Expectation:
        """The step of these programs; without any, the one that is expected."""
        return self.known[order] if order else self.expected

    def request_measuring(self, order: tuple[str, ...]) -> None:
        """A step of these programs, the next time it comes."""
        self.known[order].settled = False

    def abandon_call(self) -> None:
        """The call that runs ended with an exception: it is no part of the step, nor does the step go on."""
        if self.programs:
            self.programs.pop()
        self.running = None
        self.base = None
        self.at = len(self.expected.programs)

    def _note_leading_inference(self, order: tuple[str, ...], training: bool) -> None:
        """Keep in mind which inference came before this step, if that came once."""
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
    ) -> Step | None:
        """Ends the step and expects another one like it; returns it if all of it was measured."""
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
        self._note_leading_inference(order, training)
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
        return Step(calls, ended_ns, kinds, exposed, taken)
