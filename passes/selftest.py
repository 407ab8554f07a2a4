"""A self-test of slots on the installed torch.

In: "inductor" or "eager". Out: a line about the first fault found, or "". A slot is a call before a kernel
that announces the tensors of the kernel. A small graph runs forward and backward with slots. Before each
kernel, all tensors that the kernel's slot does not announce are filled with NaN:

    slot i      kernel i reads w                -> w has its bytes
                kernel i does not read w        -> w is NaN, and its bytes are in a copy
    kernel i    runs
    exit        all tensors that the caller sees have their bytes

Three faults therefore change the results: a slot is missing, a slot is late, or a slot lacks a tensor of its
kernel. The inputs are small integers, so every sum is exact in any order. The results must equal the results
of a run without slots bit for bit.

The self-test runs in a process of its own, for two reasons. (1) A compile of user code starts the self-test,
and this compile holds locks and state of torch. (2) An untested version of torch could end the process. In
the self-test, slots call this file's SlotChecker instead of the engine.
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

DEADLINE_S = 600  # time limit; Inductor's C++ compilations take half a minute on a slow machine
FEWEST_KERNELS = 3  # with fewer, slots are missing: forward and backward have at least four kernels each


class SelfTestError(Exception):
    """A fault of slots that the self-test has found."""


@dataclass
class HiddenStorage:
    """A storage, and a copy of its bytes while the storage itself is filled with NaN."""

    storage: torch.UntypedStorage
    copy: torch.Tensor
    name: str
    is_nan: bool = False
    written: bool = True  # True if a slot announced a write since the last copy


class SlotChecker:
    """A replacement of the engine in the self-test.

    At each slot, the checker compares the call with the schedule. It fills each tensor with NaN that the next
    kernel does not use.
    """

    def __init__(self) -> None:
        self.hidden: dict[int, HiddenStorage] = {}
        self.bound: dict[int, int] = {}  # index of a buffer in the running program -> key of its storage
        self.ran: list[Schedule] = []
        self.visited = 0  # number of slots that the running program has called

    def check_slot_and_hide_unneeded(self, schedule: Schedule, index: int, tensors: Sequence[Any]) -> None:
        if index == 0:
            self.bound.clear()
            self.ran.append(schedule)
            self.visited = 0
        where = f"slot {index} of the {schedule.kind}"
        if index != self.visited or schedule != self.ran[-1]:
            raise SelfTestError(f"{where} was called, but slot {self.visited} was expected")
        self.visited += 1
        slot = schedule.slots[index]
        if len(tensors) != len(slot.buffers):
            raise SelfTestError(f"{where} got {len(tensors)} tensors, not {len(slot.buffers)}")
        needed: set[int] = set()
        for buffer, flags, tensor in zip(slot.buffers, slot.flags, tensors):
            key = self._check_and_bind_tensor(schedule, buffer, bool(flags & MADE), tensor, where)
            self.hidden[key].written |= bool(flags & (WRITE | MADE))
            if flags & (READ | WRITE):
                needed.add(key)
        if index == len(schedule.slots) - 1:
            if len(self.bound) != len(schedule.buffers):
                raise SelfTestError(
                    f"the {schedule.kind} passed {len(self.bound)} of its "
                    f"{len(schedule.buffers)} tensors to slots"
                )
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
            raise SelfTestError(f"{where} got another type or size for {about.name}")
        storage = tensor.untyped_storage()
        key = storage._cdata
        # A program passes its arguments to the first slot, and any other tensor to the slot after its kernel.
        expected = self.visited == 1 if about.role == "argument" else made
        if buffer not in self.bound and not expected:
            raise SelfTestError(f"{where} got {about.name}, but an earlier slot did not get it")
        if not made and self.bound.get(buffer, key) != key:
            raise SelfTestError(f"{where} got another tensor for {about.name} than earlier slots")
        self.bound[buffer] = key
        if key not in self.hidden:
            self.hidden[key] = HiddenStorage(storage, _view_as_bytes(storage).clone(), about.name)
        return key

    def check_both_programs_ran(self) -> None:
        kinds = [schedule.kind for schedule in self.ran]
        if kinds != ["forward", "backward"]:
            raise SelfTestError(f"slots ran in {' and '.join(kinds) or 'no program'}, not in both programs")
        if self.visited != len(self.ran[-1].slots):
            raise SelfTestError(f"the backward ended at slot {self.visited} of {len(self.ran[-1].slots)}")
        for schedule in self.ran:
            if len(schedule.slots) - 2 < FEWEST_KERNELS:  # the slots `enter` and `exit` have no kernel
                raise SelfTestError(
                    f"the {schedule.kind} has slots for only {len(schedule.slots) - 2} kernels"
                )


def _view_as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _restore_bytes(hidden: HiddenStorage) -> None:
    if hidden.is_nan:
        _view_as_bytes(hidden.storage).copy_(hidden.copy)
        hidden.is_nan = False


def _save_bytes_and_fill_nan(hidden: HiddenStorage) -> None:
    if hidden.is_nan:
        return
    now = _view_as_bytes(hidden.storage)
    if hidden.written:
        hidden.copy.copy_(now)
        hidden.written = False
    elif not torch.equal(hidden.copy, now):
        raise SelfTestError(f"a kernel wrote {hidden.name}, but no slot announced the write")
    now.fill_(0xFF)  # these bytes are NaN in every floating-point type
    hidden.is_nan = True


WATCH: list[SlotChecker] = []  # the checker of the running self-test


def program(text: str) -> Callable[..., None]:
    """Return the function that the slots of a program call. `text` is the program's schedule.

    When torch loads a program of the self-test, the program calls `program`.
    """
    schedule = Schedule.parse(text)

    def call_checker(index: int, tensors: Sequence[Any], live_bytes: Any = None) -> None:
        if WATCH:
            WATCH[-1].check_slot_and_hide_unneeded(schedule, index, tensors)

    return call_checker


def make_test_graph() -> torch.fx.GraphModule:
    """Make a graph as Dynamo would pass it to a backend: sum(relu(x @ w1 * b) @ w2 * w3).

    Inductor may fuse operators in any way: each kernel of the forward reads a weight.
    """
    made = torch.fx.Graph()
    x, w1, b, w2, w3 = (made.placeholder(name) for name in ("x", "w1", "b", "w2", "w3"))
    hidden = made.call_function(torch.mul, (made.call_function(torch.matmul, (x, w1)), b))
    hidden = made.call_function(torch.relu, (hidden,))
    result = made.call_function(torch.mul, (made.call_function(torch.matmul, (hidden, w2)), w3))
    made.output((made.call_function(torch.sum, (result,)),))
    return torch.fx.GraphModule(torch.nn.Module(), made)


def make_test_inputs(device: str) -> list[torch.Tensor]:
    """Make inputs of integers from -2 to 2.

    All operands of matrix products then lie between -96 and 96, intermediate results included. Such integers
    are exact in bfloat16, so the products would be exact in bfloat16 as well."""
    shapes = ((6, 8), (8, 10), (10,), (10, 12), (12,))
    made = []
    for number, shape in enumerate(shapes):
        count = torch.Size(shape).numel()
        values = (torch.arange(count, device=device) * (7 + number) + number) % 11 % 5 - 2
        made.append(values.reshape(shape).to(torch.float32).requires_grad_(number > 0))
    return made


def compute_loss_and_gradients(run: Callable[..., Any], device: str) -> list[torch.Tensor]:
    """Return the loss and the gradient of each weight."""
    arguments = make_test_inputs(device)
    (loss,) = run(*arguments)
    loss.backward()
    return [loss.detach(), *(a.grad for a in arguments if a.grad is not None)]


def find_fault_in_slots(inner: str, device: str = "cpu") -> str:
    """Return a line about the first fault of the slots, or "" if there is none.

    `inner` selects the kind of the compiled program: "eager" or "inductor".
    """
    try:
        _compare_with_plain_run(inner, device)
    except Exception as error:  # noqa: BLE001  an untested torch may raise anything
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
                f"numbers differ from a plain run ({name}): a kernel ran without a tensor that it reads"
            )


def _compile_test_graph(inner: str, device: str) -> Callable[..., Any]:
    # The import may fail with an untested torch. The caller of this function handles such an error.
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
            raise SelfTestError(f"the slot before {node.name} of the {kind} is for another kernel")
    connect(program(schedule.as_json_text))


def _raise_on_notice(notice: str) -> None:
    raise SelfTestError(notice)


def run_selftest_in_subprocess(inner: str, device: str) -> str:
    """Run `find_fault_in_slots` in a separate process and return its result."""
    command = [sys.executable or "python3", "-m", __name__, inner, device]
    # The child process gets `sys.path` of this process, because user code may have added folders to it.
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
    # Compiled programs import this file as `teraio.passes.selftest`. This script must use the same module,
    # because the programs look for the checker in the module's `WATCH`.
    from teraio.passes import selftest

    sys.stdout.write("\n" + json.dumps(selftest.find_fault_in_slots(*sys.argv[1:])) + "\n")
