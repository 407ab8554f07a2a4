"""The least memory with which a step can run (its floor), computed without the engine.

A plain run executes its graphs node by node. For each kernel, the module subtracts the bytes that an engine
could evict from the allocated bytes.

    floor(kernel) = peak of all tensors while it runs                      (counted by the allocator)
                  - weights, gradients, optimizer states and saved activations that it does not touch

The remaining bytes belong to (1) tensors that the kernel reads or writes, (2) the kernel's workspace, (3)
other tensors of the kernel's program, and (4) unevictable inputs and results. An optimizer's update of one
parameter counts as a kernel. The floor also includes teraio's own memory: the reserve, of which the store's
slabs are a part. This memory is the same for every model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import counting_allocator
import torch
from torch._guards import TracingContext
from torch.multiprocessing.reductions import StorageWeakRef

from teraio.passes.fx import program as fx

ENGINES_OWN_BYTES = 4 * 2**20


def storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of all tensors in a value, also in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage()
    elif isinstance(value, tuple | list):
        for part in value:
            yield from storages(part)
    elif isinstance(value, dict):
        yield from storages(list(value.values()))


class Floor:
    """A measurement of a step's floor: the least memory with which all kernels of the programs can run.
    `backend` compiles the programs. The measurement lasts from the call of `start` to the call of `stop`, and
    resets the allocator's peak.
    """

    def __init__(self, counting: counting_allocator.Counting) -> None:
        self.counting = counting
        self.others = 0  # bytes of memory that does not belong to the training
        self.watching = False
        self.weights: dict[int, int] = {}
        self.states: dict[int, int] = {}  # bytes of optimizer states, by the parameter's id
        # (weak reference, bytes) by address; while the weak reference exists, torch cannot reuse the address
        self.saved: dict[int, tuple[StorageWeakRef, int]] = {}
        self.saved_names: dict[str, int] = {}  # bytes that forwards saved for their backwards, by node name
        self.floor_bytes = 0
        self.kernel = ""
        self.calls = 0

    def backend(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        """Compile a graph for the inner program `eager`, without a budget. Between `start` and `stop`,
        programs run node by node.
        """
        latest: list[Program] = []

        def note(graph: torch.fx.GraphModule, kind: str) -> None:
            latest.append(Program(graph, kind))

        def around(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
            program = latest[-1]

            def call(arguments: list[Any]) -> Any:
                return program.run(arguments, self) if self.watching else run(arguments)

            return call

        return fx.make_aot_backend(note, around)(gm, example_inputs)

    def start(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, others: int) -> None:
        """Begin the measurement. Call this method before the step begins. `others` is the number of bytes
        that do not belong to the training.
        """
        self.others = others
        self.states = {
            id(p): sum(s.nbytes() for s in storages(optimizer.state.get(p))) for p in model.parameters()
        }
        self.weights = {s._cdata: s.nbytes() for p in model.parameters() for s in storages(p.data)}
        self.saved.clear()
        self.saved_names.clear()
        self.watching, self.calls = True, 0

    def stop(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, and end the measurement.

        The optimizer updates one parameter after another. The floor of the optimizer's step is the sum of (1)
        the step's extra memory, and (2) the memory of the largest parameter with its gradient and states.
        """
        before = self.counting.alive_bytes()
        self.counting.reset_peak()
        optimizer.step()
        updated = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        largest = max(2 * p.untyped_storage().nbytes() + self.states[id(p)] for p in updated)
        self.take("optimizer.step", largest + self.counting.peak_bytes() - before)
        self.watching = False

    def at_least(self, touched: set[int]) -> int:
        """Return the peak of the last kernel, minus the weights, states and saved activations that the kernel
        did not touch.
        """
        self.saved = {key: kept for key, kept in self.saved.items() if not kept[0].expired()}
        elsewhere = sum(size for key, size in self.weights.items() if key not in touched)
        elsewhere += sum(size for key, (_, size) in self.saved.items() if key not in touched)
        return self.counting.peak_bytes() - self.others - elsewhere - sum(self.states.values())

    def take(self, kernel: str, size_bytes: int) -> None:
        size_bytes += ENGINES_OWN_BYTES
        if size_bytes > self.floor_bytes:
            self.floor_bytes, self.kernel = size_bytes, kernel


class Moment(NamedTuple):
    """A kernel that has run, with the storages that it touched and the least memory that it needed."""

    kernel: str
    touched: set[int]
    size_bytes: int
    made_count: int  # number of storages that the program had made when this kernel ended


class Program:
    def __init__(self, gm: torch.fx.GraphModule, kind: str) -> None:
        self.gm = gm
        self.nodes = list(gm.graph.nodes)
        self.kind = kind
        tracing = TracingContext.try_get()
        assert tracing is not None and tracing.fw_metadata is not None
        self.to_caller = tracing.fw_metadata.num_forward_returns
        last_user = {used: node for node in self.nodes for used in (*node.all_input_nodes, node)}
        self.dies: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        for used, node in last_user.items():
            self.dies.setdefault(node, []).append(used)

    def run(self, arguments: list[Any], floor: Floor) -> Any:
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        values: dict[torch.fx.Node, Any] = dict(zip(placeholders, arguments))
        known = {s._cdata: StorageWeakRef(s) for s in storages(arguments)}
        argument_keys = set(known)
        arguments.clear()
        made: dict[int, str] = {}
        moments: list[Moment] = []
        for node in self.nodes:
            if node.op == "output":
                result = torch.fx.node.map_arg(node.args[0], values.__getitem__)
                kept = self._kept(result, argument_keys, made)
                self._settle(floor, moments, made, known, kept)
                return result
            if node.op == "get_attr":
                values[node] = getattr(self.gm, str(node.target))
            elif node.op == "call_function":
                assert callable(node.target)
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                floor.counting.reset_peak()
                values[node] = node.target(*args, **kwargs)
                touched = [*storages(args), *storages(kwargs), *storages(values[node])]
                for storage in touched:
                    if storage._cdata not in known:
                        known[storage._cdata] = StorageWeakRef(storage)
                        made[storage._cdata] = node.name
                keys = {s._cdata for s in touched}
                del args, kwargs, touched
                moments.append(Moment(node.name, keys, floor.at_least(keys), len(made)))
            else:
                assert node.op == "placeholder", node.op
            for dead in self.dies.get(node, ()):
                values.pop(dead, None)
        raise AssertionError("a graph without an output")

    def _kept(self, result: Any, arguments: set[int], made: dict[int, str]) -> dict[int, int]:
        """Return the sizes in bytes of two kinds of storages: (1) storages that a forward saves only for its
        backward, and (2) storages that a backward returns as gradients.
        """
        if self.kind == "inference":
            return {}
        if self.kind == "backward":
            return {s._cdata: s.nbytes() for s in storages(list(result)) if s._cdata not in arguments}
        seen = {s._cdata for s in storages(list(result[: self.to_caller]))}
        kept = {s._cdata: s.nbytes() for s in storages(list(result[self.to_caller :]))}
        return {key: size for key, size in kept.items() if key not in seen and key not in arguments}

    def _settle(
        self,
        floor: Floor,
        moments: list[Moment],
        made: dict[int, str],
        known: dict[int, StorageWeakRef],
        kept: dict[int, int],
    ) -> None:
        """Compute the floor of each kernel after the program has ended. Before the end, it is unknown which
        tensors the program saves. Of the program's own tensors, only saved ones are evictable.
        """
        order = list(made)
        for moment in moments:
            made_by_now = order[: moment.made_count]
            elsewhere = sum(kept.get(key, 0) for key in made_by_now if key not in moment.touched)
            floor.take(f"{self.kind} {moment.kernel}", moment.size_bytes - elsewhere)
        for key, size in kept.items() if self.kind == "forward" else ():
            floor.saved[key] = (known[key], size)
            name = f"{floor.calls}.{made[key]}"
            floor.saved_names[name] = floor.saved_names.get(name, 0) + size
        floor.calls += 1
