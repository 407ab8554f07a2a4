"""Runs of models whose slots call the class `Tightest`, in a process that counts every byte. A slot is a call
before a kernel. `Tightest` stands for an engine with the smallest possible budget.

    slots_child.py '[{"model": "block", "inner": "eager"}, ...]'

Each slot fetches the tensors that its kernel needs, and evicts all others. Until the next slot, the number of
living bytes may not exceed the number that the slot declared. The script prints a JSON list with one object
per case. The object tells whether the numbers equal the numbers without slots, and which kernels exceeded the
declared bytes. It also holds further facts for the tests.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

import counting_allocator
import slots_models
import torch
import torch._functorch.config as functorch_config

from teraio.formats.schedule import MADE, READ, WRITE, Schedule
from teraio.passes.fx import program as fx
from teraio.passes.inductor import codegen

sys.modules["slots_child"] = sys.modules[__name__]  # generated programs import `program` from this module


class Known:
    """A storage that a slot received."""

    def __init__(self, storage: torch.UntypedStorage, movable: bool, weight: bool) -> None:
        self.weak: Any = storage._weak_ref()
        self.size_bytes = storage.nbytes()
        self.movable = movable
        self.weight = weight
        self.saved_bytes: bytearray | None = None

    def storage(self) -> torch.UntypedStorage | None:
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.weak)
        return storage

    def leave(self) -> None:
        storage = self.storage()
        if storage is not None and self.saved_bytes is None and self.size_bytes:
            self.saved_bytes = bytearray(ctypes.string_at(storage.data_ptr(), self.size_bytes))
            storage.resize_(0)

    def come(self) -> None:
        storage = self.storage()
        if storage is not None and self.saved_bytes is not None:
            storage.resize_(self.size_bytes)
            source = (ctypes.c_char * self.size_bytes).from_buffer(self.saved_bytes)
            ctypes.memmove(storage.data_ptr(), source, self.size_bytes)
            self.saved_bytes = None


class Tightest:
    def __init__(self, counting: counting_allocator.Counting) -> None:
        self.counting = counting
        self.known: dict[int, Known] = {}
        self.bound: dict[int, Known] = {}
        self.allowed = 0
        self.others = 0
        self.excess: dict[str, int] = {}
        self.kernel = ""
        self.slots = 0
        self.evicted = 0
        self.programs: list[Schedule] = []
        self.notices: list[str] = []

    def program(self, text: str) -> Callable[..., None]:
        schedule = Schedule.parse(text)
        self.programs.append(schedule)

        def slot(index: int, tensors: Any, live_bytes: int | None = None) -> None:
            self.visit(schedule, index, tensors, live_bytes)

        return slot

    def visit(self, schedule: Schedule, index: int, tensors: Any, live_bytes: int | None) -> None:
        about = schedule.slots[index]
        over = self.counting.peak_bytes() - self.allowed
        if index and over > 0:
            self.excess[self.kernel] = max(over, self.excess.get(self.kernel, 0))
        self.slots += 1
        if index == 0:
            self.bound.clear()
        assert len(tensors) == len(about.buffers)
        needed: list[Known] = []
        for buffer, flags, tensor in zip(about.buffers, about.flags, tensors):
            if flags & MADE or index == 0:
                self.bound[buffer] = self.register(schedule, buffer, tensor)
            if flags & (READ | WRITE):
                needed.append(self.bound[buffer])
        last = index == len(schedule.slots) - 1
        self.known = {key: known for key, known in self.known.items() if known.storage() is not None}
        if last:
            needed += [known for known in self.known.values() if known.weight]
        for known in self.known.values():
            if known.movable and known not in needed and known.saved_bytes is None:
                known.leave()
                self.evicted += 1
        for known in needed:
            known.come()
        resident = sum(known.size_bytes for known in self.known.values() if known.saved_bytes is None)
        if index == 0:
            self.others = self.counting.alive_bytes() - resident
        live = about.live_bytes if live_bytes is None else live_bytes
        assert isinstance(live, int), f"{about.kernel}: {live!r} is no number of bytes"
        self.allowed, self.kernel = self.others + resident + live, about.kernel
        self.counting.reset_peak()

    def register(self, schedule: Schedule, buffer: int, tensor: Any) -> Known:
        storage, about = tensor.untyped_storage(), schedule.buffers[buffer]
        weight = isinstance(tensor, torch.nn.Parameter) and about.role == "argument" and not about.held
        if storage._cdata not in self.known:
            self.known[storage._cdata] = Known(storage, about.role == "saved" or weight, weight)
        return self.known[storage._cdata]


WATCH: list[Tightest] = []


def program(text: str) -> Callable[..., None]:
    return WATCH[-1].program(text)


def backend(inner: str, slotted: bool, settings: dict[str, Any] | None = None) -> Callable[..., Any]:
    def transform(gm: torch.fx.GraphModule, kind: Any) -> None:
        if slotted:
            schedule, connect = fx.insert_slots(gm, kind)
            connect(program(schedule.as_json_text))

    def compile_graph(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        with functorch_config.patch(enable_autograd_cache=False):
            if inner == "eager":
                return fx.make_aot_backend(transform)(gm, inputs)
            notice = WATCH[-1].notices.append if slotted else None
            return codegen.compile_program(gm, inputs, notice, registry="slots_child", settings=settings)

    return compile_graph


def train(case: dict[str, Any], slotted: bool) -> tuple[list[bytes], list[float]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    about = slots_models.MODELS[case["model"]]
    model = about.make()
    made = backend(case["inner"], slotted, case.get("settings"))
    compiled = torch.compile(model, backend=made, dynamic=about.dynamic)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for step, batch in enumerate(about.batches):
        torch.manual_seed(step)
        x = about.input(batch)
        with torch.set_grad_enabled(about.trains):
            loss = compiled(x)
        if about.trains:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        del loss, x
    return [p.detach().numpy().tobytes() for p in model.parameters()], losses


def run(case: dict[str, Any], counting: counting_allocator.Counting) -> dict[str, Any]:
    plain = train(case, slotted=False)
    WATCH.append(Tightest(counting))
    ours = train(case, slotted=True)
    watch = WATCH.pop()
    return {
        "equal": plain == ours,
        "losses": ours[1],
        "excess": watch.excess,
        "slots": watch.slots,
        "evicted": watch.evicted,
        "kernels": [[slot.kernel for slot in schedule.slots] for schedule in watch.programs],
        "symbolic": [schedule.symbolic for schedule in watch.programs],
        "notices": watch.notices,
    }


def main() -> None:
    counting = counting_allocator.install()
    torch.set_num_threads(1)
    results = []
    for case in json.loads(sys.argv[1]):
        try:
            results.append(run(case, counting))
        except Exception as error:  # noqa: BLE001  the test checks the error
            results.append({"error": f"{type(error).__name__}: {error}"})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
