"""A simulation of one training step on fake tensors.

The simulated step has the same graphs as a real step with `inner="eager"`: the same code captures the graph,
cuts it into forward and backward, and inserts slots. A slot is a point before a kernel at which the engine
acts. The programs run on fake tensors, which have shapes but no numbers. At each slot the simulation records
the tensors in use and the bytes that cannot move. Then it advances a simulated clock by the kernel's
estimated time. The result is a `Step`, the type that a measured step has, too.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from teraio.errors import OptionError, UnsupportedError
from teraio.formats.schedule import Call, ProgramKind, Schedule, Step
from teraio.passes.capture import aot
from teraio.passes.fx import program
from teraio.passes.synth import operator_costs
from teraio.runtime.ledger.adoption import SMALLEST_BYTES
from teraio.runtime.step.program import Program
from teraio.session.session import count_graph_as_ours

from .torch_errors import INSTEAD, last_line_of_stack


@dataclass
class Record:
    """A storage of a tensor, with the name and kind that the profile gives to it."""

    storage: StorageWeakRef
    name: str
    kind: str
    size_bytes: int
    movable: bool


@dataclass
class RunningCall:
    """A simulated call of a program. Each slot of the program adds a time and a number of live bytes."""

    schedule: Schedule
    bound: list[Record | None] = field(default_factory=list)
    at_ns: list[int] = field(default_factory=list)
    live_bytes: list[int] = field(default_factory=list)

    def as_measured_call(self) -> Call:
        names = tuple("" if record is None else record.name for record in self.bound)
        stalls = (0,) * len(self.at_ns)
        return Call(self.schedule, names, tuple(self.at_ns), tuple(self.live_bytes), stalls)


class Ledger:
    """A record of the simulated step: all storages, all calls so far, and the simulated clock."""

    def __init__(self, mode: FakeTensorMode, reserve_bytes: int) -> None:
        self.mode = mode  # the mode that creates fake tensors
        self.reserve_bytes = reserve_bytes
        self.records: dict[int, Record] = {}  # key: address of the storage object
        self.all_records: list[Record] = []  # records of all storages, freed storages included
        self.names: set[str] = set()
        self.calls: list[RunningCall] = []
        self.outside: dict[int, int] = {}
        self.now_ns = 0

    def record_of(self, tensor: torch.Tensor) -> Record | None:
        key = tensor.untyped_storage()._cdata
        found = self.records.get(key)
        if found is not None and found.storage.expired():  # a freed storage had this address
            del self.records[key]
            return None
        return found

    def add_record(self, tensor: torch.Tensor, name: str, kind: str, movable: bool) -> Record | None:
        """Record a storage and return its record. Return None for a storage below SMALLEST_BYTES, which the
        engine does not record in a training either.
        """
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST_BYTES:
            return None
        record = Record(StorageWeakRef(storage), name, kind, int(storage.nbytes()), movable)
        self.records[storage._cdata] = record
        self.all_records.append(record)
        self.names.add(name)
        return record

    def rename_and_make_movable(self, record: Record, name: str, kind: str) -> None:
        record.name, record.kind, record.movable = name, kind, True
        self.names.add(name)

    @property
    def immovable_bytes(self) -> int:
        """Return the bytes of live storages that cannot be evicted: the batch, and results that user code
        holds.
        """
        immovable = (record for record in self.records.values() if not record.movable)
        return sum(record.size_bytes for record in immovable if not record.storage.expired())

    def start_call(self, schedule: Schedule, bound: Sequence[Record] = ()) -> RunningCall:
        """Begin a simulated call, and return it.

        `bound` has the records of the call's buffers. If it is missing, the slots of the program find or make
        the records.
        """
        running = RunningCall(schedule, [*bound] or [None] * len(schedule.buffers))
        self.calls.append(running)
        return running

    def log_slot_and_advance_clock(self, running: RunningCall, live_bytes: int, cost_ns: int) -> None:
        """Record the clock and the live bytes at a slot. Then advance the clock by the duration of the kernel
        after the slot.
        """
        running.at_ns.append(self.now_ns)
        running.live_bytes.append(live_bytes + self.immovable_bytes + self.reserve_bytes)
        self.now_ns += cost_ns

    def rewind_point(self) -> tuple[int, int]:
        return len(self.calls), self.now_ns

    def rewind_to(self, mark: tuple[int, int]) -> None:
        """Delete all calls that began after the mark, and set the clock back to the mark's time."""
        calls, self.now_ns = mark
        del self.calls[calls:]

    def as_measured_step(self) -> Step:
        calls = tuple(running.as_measured_call() for running in self.calls)
        seen = {name for call in calls for name in call.tensors}
        kinds = {
            record.name: (record.name, record.kind, record.size_bytes, record.kind in ("weight", "state"))
            for record in self.all_records
            if record.movable and record.name in seen
        }
        outside = tuple(self.outside.get(number, 0) for number in range(len(calls)))
        return Step(calls, self.now_ns, tuple(kinds[n] for n in sorted(kinds)), frozenset(), outside)


class SlottedProgram:
    """A program with slots. For each slot, it has the estimated duration of the kernel after the slot."""

    def __init__(
        self, ledger: Ledger, speeds: operator_costs.Speeds, graph: torch.fx.GraphModule, kind: ProgramKind
    ):
        self.ledger = ledger
        self.running: RunningCall | None = None
        by_node = dict(operator_costs.costs_of_nodes(graph))
        schedule, connect = program.insert_slots(graph, kind, views_read_nothing=True)
        self.program = Program(schedule)
        self.cost_ns = [0] * len(schedule.slots)
        at = -1
        for node in graph.graph.nodes:
            if getattr(node.target, "__module__", "") == "teraio":
                at = node.args[0]
            elif at >= 0:
                self.cost_ns[at] += sum(map(speeds.duration_ns, by_node.get(node, ())))
        connect(self.simulate_slot)

    def simulate_slot(
        self, index: int, tensors: Sequence[torch.Tensor], live_bytes: int | None = None
    ) -> None:
        if index == 0:
            self.running = self.ledger.start_call(self.program.schedule)
        assert self.running is not None
        stop, bound = self.program.stops[index], self.running.bound
        for position, buffer in stop.made:
            bound[buffer] = self.ledger.record_of(tensors[position]) or self.add_record_of_buffer(
                buffer, tensors[position]
            )
        for buffer in stop.returned:
            record = bound[buffer]
            if record is not None and record.kind != "weight":
                record.movable = False  # user code may hold the storage from this slot on
        self.ledger.log_slot_and_advance_clock(self.running, stop.live_bytes, self.cost_ns[index])

    def add_record_of_buffer(self, buffer: int, tensor: torch.Tensor) -> Record | None:
        """Record the storage of a program's buffer, and return its record.

        The record has the name and kind that the engine gives to this storage in a real training.
        """
        schedule, number = self.program.schedule, len(self.ledger.calls) - 1
        about = schedule.buffers[buffer]
        if about.role == "argument" and self.program.is_weight(buffer, tensor):
            label = self.program.label_of_buffer(buffer)
            name = label if label not in self.ledger.names else f"{number}.{label}"
            return self.ledger.add_record(tensor, name, "weight", not about.held)
        kind = {"argument": "input"}.get(about.role, "activation")
        if schedule.kind == "backward" and about.role == "result":
            kind = "grad"
        movable = about.role == "saved" or about.edge >= 0  # the engine may evict a weight's gradient at once
        return self.ledger.add_record(tensor, f"{number}.{about.name}", kind, movable)


# Numbers for user code that reads a number from a fake tensor, such as `if mask.any()`. If torch cannot infer
# the number, the table gives the number for the tensor's dtype.
NUMBERS = {torch.bool: False, torch.float64: 1.0, torch.float32: 1.0, torch.float16: 1.0, torch.bfloat16: 1.0}


class CostCounter(TorchDispatchMode):
    """A counter of the estimated time and the peak bytes of operators that run outside compiled programs."""

    def __init__(self, speeds: operator_costs.Speeds) -> None:
        super().__init__()
        self.speeds = speeds
        self.ns = 0
        self.peak_bytes = 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is torch.ops.aten._local_scalar_dense.default:
                return NUMBERS.get(args[0].dtype, 1)
            raise
        cost = operator_costs.cost_of_call(func, args, kwargs or {}, result)
        self.ns += self.speeds.duration_ns(cost)
        given = {t.untyped_storage()._cdata for t in operator_costs.strided_tensors_in((args, kwargs))}
        for tensor in operator_costs.strided_tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self.alive[storage._cdata] = StorageWeakRef(storage), int(storage.nbytes())
        self.alive = {key: kept for key, kept in self.alive.items() if not kept[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size_bytes for _, size_bytes in self.alive.values()))
        return result


_NUMBERS = itertools.count(1)


def _call_model(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)


def copy_call_with_fresh_code() -> FunctionType:
    """Return a copy of `_call_model` that has its own code object.

    Dynamo stores compiled programs, and the input sizes that have changed, per code object. With its own code
    object, an estimate cannot affect the user's own compiles. Dynamo frees the estimate's programs together
    with this code object.
    """
    code: CodeType = _call_model.__code__.replace(co_filename=f"<teraio.estimate {next(_NUMBERS)}>")
    return FunctionType(code, {"__builtins__": __builtins__})


def _refuse_data_dependent_sizes(gm: torch.fx.GraphModule) -> None:
    """Raise an error if a tensor in the graph has a symbolic size.

    All input sizes are numbers. So a symbolic size depends on the values in a tensor, and an estimate has no
    values.
    """
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and not all(isinstance(size, int) for size in value.shape):
            raise UnsupportedError(
                f"estimate: the size of {node.name} depends on computed values, and an estimate has none"
                f"{last_line_of_stack(node.stack_trace or '')}. {INSTEAD}"
            )


def compile_with_ledger(
    model: torch.nn.Module, ledger: Ledger, speeds: operator_costs.Speeds
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Compile the model. The compiled programs record their simulated calls in the ledger."""

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        count_graph_as_ours()  # the session would otherwise take this graph for a graph of another compiler
        _refuse_data_dependent_sizes(gm)
        labels = aot.weight_and_buffer_names(gm)

        def add_slots(graph: torch.fx.GraphModule, kind: ProgramKind) -> None:
            slotted = SlottedProgram(ledger, speeds, graph, kind)
            if kind != "backward":
                slotted.program.name_arguments(labels)

        # Compile the backward here, together with the forward. Compilation copies the constants of the graph.
        # If autograd's backward started the compiler, every new tensor would be fake, and so would these
        # copies.
        with functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
            return program.make_aot_backend(add_slots)(gm, inputs)

    compiled = torch.compile(copy_call_with_fresh_code(), backend=backend, fullgraph=True, dynamic=False)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Let Dynamo ignore calls of logging methods in the model.
        log_methods = {method for method in vars(logging.Logger).values() if callable(method)}
        with dynamo_config.patch(ignore_logger_methods=log_methods):
            return compiled(model, args, kwargs)

    return run


def simulate_forward_and_backward(
    model: torch.nn.Module,
    batch: tuple[tuple[Any, ...], dict[str, Any]],
    loss: Callable[[Any], Any] | None,
    ledger: Ledger,
    speeds: operator_costs.Speeds,
) -> str:
    """Simulate a forward and a backward, and record both in the ledger. Set the parameters' gradients to fake
    tensors.

    Return a note that explains what was taken as the loss.
    """
    output = compile_with_ledger(model, ledger, speeds)(*batch)
    note = "the loss is the one that was given"
    root = None
    if loss is None:
        root, note = find_loss_in_output(output)
        loss = _sum_of_outputs
    if root is not None:
        del output
        root.backward()
    else:
        _run_backward_through_loss(output, loss, ledger, CostCounter(speeds))
    for name, parameter in model.named_parameters():
        _record_gradient(ledger, name, parameter)
    return note


def find_loss_in_output(output: Any) -> tuple[torch.Tensor | None, str]:
    """Return a pair: the scalar loss in a model's output, and a note that names its place.

    The loss must be a scalar that requires a gradient. Take the output's `loss`, if it is such a scalar.
    Otherwise, take the output itself or its first item. Return None for the loss if that is no such scalar.
    """
    first = output[0] if isinstance(output, tuple | list) and output else output
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    for found, where in ((named, "the model's `loss`"), (first, "the scalar that the model returns")):
        if isinstance(found, torch.Tensor) and found.numel() == 1 and found.requires_grad:
            return found, f"the loss is {where}"
    return None, "the model returns no loss, so the loss is the sum of its outputs (give loss= for another)"


def _sum_of_outputs(output: Any) -> torch.Tensor:
    return sum(tensor.sum() for tensor in operator_costs.strided_tensors_in(output) if tensor.requires_grad)  # type: ignore[return-value]


def _run_backward_through_loss(
    output: Any, loss: Callable[[Any], Any], ledger: Ledger, counted: CostCounter
) -> None:
    """Compute the loss from the model's output, and run the backward.

    In a real step, user code computes the loss outside the compiled programs. So this function adds the
    loss's time to the clock, and its peak bytes to the bytes that user code allocates after the forward.
    """
    ends = {id(t): t for t in operator_costs.strided_tensors_in(output) if t.requires_grad}
    if not ends:
        raise UnsupportedError("estimate: no output of the model requires a gradient")
    cut = {key: tensor.detach().requires_grad_() for key, tensor in ends.items()}
    seen = tree_map_only(torch.Tensor, lambda t: cut.get(id(t), t), output)
    with counted:
        value = loss(seen)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise OptionError(
                f"estimate: loss gives {_describe_value(value)}; expected a scalar tensor that depends on "
                "the model's output"
            )
        gradients = torch.autograd.grad(value, list(cut.values()), allow_unused=True)
    ledger.now_ns += counted.ns
    ledger.outside[len(ledger.calls) - 1] = counted.peak_bytes
    reached = [(end, gradient) for end, gradient in zip(ends.values(), gradients) if gradient is not None]
    torch.autograd.backward([end for end, _ in reached], [gradient for _, gradient in reached])


def _describe_value(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:60]


def _record_gradient(ledger: Ledger, name: str, parameter: torch.nn.Parameter) -> None:
    weight, gradient = ledger.record_of(parameter), parameter.grad
    if weight is None or gradient is None:
        return
    record = ledger.record_of(gradient) or ledger.add_record(gradient, f"{name}.grad", "grad", True)
    if record is not None and record.kind != "weight":
        ledger.rename_and_make_movable(record, f"{weight.name}.grad", "grad")
