"""Do slots work on this torch? A small graph, forward and backward, through one inner program.

Meanwhile every tensor that a program hands to its slots is NaN, except while a kernel was promised it:

    slot i      kernel i reads w        -> w has its bytes
                kernel i does not       -> w is NaN, its bytes are in a copy
    kernel i    runs
    exit        all that the caller sees has its bytes

So a slot that is missing, late or without one of its kernel's tensors changes the numbers. The inputs are
small integers: every sum is exact in any order, and the numbers must be the plain ones to the last bit.

It runs in a process of its own: when it is asked for, a compilation of the user's is under way, which holds
torch's locks and notes, and a torch that nobody knows may end a process. These slots call `program` in this
file, not the engine's.
"""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from teraio.formats.schedule import MADE, READ, WRITE, ProgramKind, Schedule

DEADLINE_S = 600  # Inductor's C++ compilations take half a minute on a slow machine
FEWEST_KERNELS = 3  # with all fusion there is, each of the two programs has four or more


class SelfTestError(Exception):
    """What the self-test found."""


@dataclass
class HiddenStorage:
    """A storage, and its bytes while it is NaN. `written`: a kernel said so since they were last copied."""

    storage: torch.UntypedStorage
    copy: torch.Tensor
    name: str
    away: bool = False
    written: bool = True


class SlotChecker:
    """Stands where the engine stands when a model runs."""

    def __init__(self) -> None:
        self.hidden: dict[int, HiddenStorage] = {}
        self.bound: dict[int, int] = {}  # buffer of the running program -> its storage
        self.ran: list[Schedule] = []
        self.visited = 0  # slots of the running program

    def check_slot_and_hide_unneeded(self, schedule: Schedule, index: int, tensors: Sequence[Any]) -> None:
        if index == 0:
            self.bound.clear()
            self.ran.append(schedule)
            self.visited = 0
        where = f"slot {index} of the {schedule.kind}"
        if index != self.visited or schedule != self.ran[-1]:
            raise SelfTestError(f"{where} came where slot {self.visited} was due")
        self.visited += 1
        slot = schedule.slots[index]
        if len(tensors) != len(slot.buffers):
            raise SelfTestError(f"{where} was handed {len(tensors)} tensors, not {len(slot.buffers)}")
        needed: set[int] = set()
        for buffer, flags, tensor in zip(slot.buffers, slot.flags, tensors):
            key = self._check_and_bind_tensor(schedule, buffer, bool(flags & MADE), tensor, where)
            self.hidden[key].written |= bool(flags & (WRITE | MADE))
            if flags & (READ | WRITE):
                needed.add(key)
        if index == len(schedule.slots) - 1:
            if len(self.bound) != len(schedule.buffers):
                raise SelfTestError(f"the {schedule.kind} ended without handing over all of its tensors")
            needed |= {key for buffer, key in self.bound.items() if schedule.buffers[buffer].role != "saved"}
        for key in needed:
            _restore_bytes(self.hidden[key])
        for key in set(self.bound.values()) - needed:
            _save_bytes_and_fill_nan(self.hidden[key])

    def _check_and_bind_tensor(
        self, schedule: Schedule, buffer: int, made: bool, tensor: Any, where: str
    ) -> int:
        about = schedule.buffers[buffer]
        if not isinstance(tensor, torch.Tensor) or tensor.untyped_storage().nbytes() != about.size_bytes:
            raise SelfTestError(f"{where} was handed something else for {about.name}")
        storage = tensor.untyped_storage()
        key = storage._cdata
        due = self.visited == 1 if about.role == "argument" else made  # arguments at the first slot
        if buffer not in self.bound and not due:
            raise SelfTestError(f"{where} was handed {about.name}, which a slot before it should have been")
        if not made and self.bound.get(buffer, key) != key:
            raise SelfTestError(
                f"{where} was handed another tensor for {about.name} than the slots before it"
            )
        self.bound[buffer] = key
        if key not in self.hidden:
            self.hidden[key] = HiddenStorage(storage, _view_as_bytes(storage).clone(), about.name)
        return key

    def check_both_programs_ran(self) -> None:
        kinds = [schedule.kind for schedule in self.ran]
        if kinds != ["forward", "backward"]:
            raise SelfTestError(f"slots were met in {' and '.join(kinds) or 'no program'}, not in both")
        if self.visited != len(self.ran[-1].slots):
            raise SelfTestError(f"the backward ended at slot {self.visited} of {len(self.ran[-1].slots)}")
        for schedule in self.ran:
            if len(schedule.slots) - 2 < FEWEST_KERNELS:  # less enter and exit
                raise SelfTestError(
                    f"the {schedule.kind} has slots for {len(schedule.slots) - 2} kernels only"
                )


def _view_as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _restore_bytes(hidden: HiddenStorage) -> None:
    if hidden.away:
        _view_as_bytes(hidden.storage).copy_(hidden.copy)
        hidden.away = False


def _save_bytes_and_fill_nan(hidden: HiddenStorage) -> None:
    if hidden.away:
        return
    now = _view_as_bytes(hidden.storage)
    if hidden.written:
        hidden.copy.copy_(now)
        hidden.written = False
    elif not torch.equal(hidden.copy, now):
        raise SelfTestError(f"a kernel wrote {hidden.name} and no slot said so")
    now.fill_(0xFF)  # NaN in every floating type
    hidden.away = True


WATCH: list[SlotChecker] = []  # the self-test that is running


def program(text: str) -> Callable[..., None]:
    """Called by a compiled program of the self-test when it is loaded, as the engine's is by all others."""
    schedule = Schedule.parse(text)

    def call_checker(index: int, tensors: Sequence[Any], live_bytes: Any = None) -> None:
        if WATCH:
            WATCH[-1].check_slot_and_hide_unneeded(schedule, index, tensors)

    return call_checker


def make_test_graph() -> torch.fx.GraphModule:
    """Two layers and a sum, as Dynamo would hand them over: sum(relu(x @ w1 * b) @ w2 * w3). However it is
    fused, each kernel of the forward reads a weight."""
    made = torch.fx.Graph()
    x, w1, b, w2, w3 = (made.placeholder(name) for name in ("x", "w1", "b", "w2", "w3"))
    hidden = made.call_function(torch.mul, (made.call_function(torch.matmul, (x, w1)), b))
    hidden = made.call_function(torch.relu, (hidden,))
    result = made.call_function(torch.mul, (made.call_function(torch.matmul, (hidden, w2)), w3))
    made.output((made.call_function(torch.sum, (result,)),))
    return torch.fx.GraphModule(torch.nn.Module(), made)


def make_test_inputs(device: str) -> list[torch.Tensor]:
    """From -2 to 2: up to 96 in what enters a matrix product, so that bfloat16 would be exact, too."""
    shapes = ((6, 8), (8, 10), (10,), (10, 12), (12,))
    made = []
    for number, shape in enumerate(shapes):
        count = torch.Size(shape).numel()
        values = (torch.arange(count, device=device) * (7 + number) + number) % 11 % 5 - 2
        made.append(values.reshape(shape).to(torch.float32).requires_grad_(number > 0))
    return made


def compute_loss_and_gradients(run: Callable[..., Any], device: str) -> list[torch.Tensor]:
    """The loss and each weight's gradient."""
    arguments = make_test_inputs(device)
    (loss,) = run(*arguments)
    loss.backward()
    return [loss.detach(), *(a.grad for a in arguments if a.grad is not None)]


def find_fault_in_slots(inner: str, device: str = "cpu") -> str:
    """What is wrong with slots in this inner program, in a line; nothing if nothing is."""
    try:
        _compare_with_plain_run(inner, device)
    except Exception as error:  # noqa: BLE001  whatever a torch that nobody knows may raise
        first = (str(error).strip() or "no message").splitlines()[0][:200]
        return first if isinstance(error, SelfTestError) else f"{type(error).__name__}: {first}"
    return ""


def _compare_with_plain_run(inner: str, device: str) -> None:
    expected = compute_loss_and_gradients(make_test_graph(), device)
    watch = SlotChecker()
    WATCH.append(watch)
    try:
        found = compute_loss_and_gradients(_compile_test_graph(inner, device), device)
    finally:
        WATCH.pop()
    watch.check_both_programs_ran()
    for name, one, other in zip(("sum", "gradient of w1", "of b", "of w2", "of w3"), expected, found):
        if not torch.equal(one, other):
            raise SelfTestError(
                f"other numbers than plainly ({name}): a kernel ran without a tensor it reads"
            )


def _compile_test_graph(inner: str, device: str) -> Callable[..., Any]:
    # Imported late, for a torch in which they cannot be.
    import torch._functorch.config as functorch_config

    made: Callable[..., Any]
    with functorch_config.patch(enable_autograd_cache=False):
        if inner == "eager":
            from .fx import program as fx

            made = fx.make_aot_backend(_insert_and_check_slots)(make_test_graph(), make_test_inputs(device))
        else:
            from .inductor import codegen

            made = codegen.compile_program(
                make_test_graph(), make_test_inputs(device), _raise_on_notice, registry=__name__
            )
    return made


def _insert_and_check_slots(gm: torch.fx.GraphModule, kind: ProgramKind) -> None:
    from .fx import program as fx

    schedule, connect = fx.insert_slots(gm, kind)
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    index = -1
    for node in calls:
        if getattr(node.target, "__module__", "") == "teraio":
            index += 1
        elif index < 0 or schedule.slots[index].kernel != node.name:
            raise SelfTestError(f"the slot before {node.name} of the {kind} is not its own")
    connect(program(schedule.as_json_text))


def _raise_on_notice(notice: str) -> None:
    raise SelfTestError(notice)


def run_selftest_in_subprocess(inner: str, device: str) -> str:
    """`run`, in a process of its own."""
    command = [sys.executable or "python3", "-m", __name__, inner, device]
    # What this process can import, that one can: its path may have grown since it started.
    paths = os.pathsep.join(path for path in sys.path if path)
    try:
        ran = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    if ran.returncode:
        last = (ran.stderr.strip() or "no message").splitlines()[-1][:200]
        return f"its process ended with {ran.returncode}: {last}"
    return str(json.loads(ran.stdout.splitlines()[-1]))


if __name__ == "__main__":
    # Not as `__main__`: compiled programs import this file by its name.
    from teraio.passes import selftest

    sys.stdout.write("\n" + json.dumps(selftest.find_fault_in_slots(*sys.argv[1:])) + "\n")
