"""Operators of a network, forward and backward. Each forward kernel notes what its backward will launch.

Gradients of an activation that has several readers are summed where they are next needed: inside the kernel
that needs them if it works elementwise (as fusing compilers do), by a kernel of its own before a matrix
product. A weight's gradient is added to in place from the second time on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .roofline import Recorder


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per element. `master_bytes` 0: the optimizer updates the weights themselves."""

    weight_bytes: int
    grad_bytes: int
    activation_bytes: int
    master_bytes: int
    moment_bytes: int


PRECISIONS = {
    "bf16-mixed": Precision(2, 2, 2, 4, 4),  # weights and gradients in bf16; fp32 master copy and moments
    "bf16": Precision(2, 2, 2, 0, 2),
    "fp32": Precision(4, 4, 4, 0, 4),
}


@dataclass(slots=True)
class Param:
    """A weight and what training adds to it. `grad` is there from its first kernel on."""

    name: str
    elements: int
    weight: int
    states: tuple[int, ...]
    grad: int | None = None


class Weights:
    """All parameters of a model, in the order in which the forward pass meets them."""

    def __init__(self, recorder: Recorder, precision: Precision) -> None:
        self.recorder, self.precision = recorder, precision
        self.of: dict[str, Param] = {}

    def param(self, name: str, elements: int) -> Param:
        if name not in self.of:
            p, make = self.precision, self.recorder.tensor
            weight = make(name, "weight", p.weight_bytes * elements, True)
            sizes = (("master", p.master_bytes), ("exp_avg", p.moment_bytes), ("exp_avg_sq", p.moment_bytes))
            states = tuple(
                make(f"{name}.{state}", "state", size * elements, True) for state, size in sizes if size
            )
            self.of[name] = Param(name, elements, weight, states)
        return self.of[name]

    def grads(self, params: Sequence[Param]) -> tuple[list[int], list[int]]:
        """(read, written) by a kernel that adds to these parameters' gradients."""
        read, written = [], []
        for param in params:
            if param.grad is None:
                size = self.precision.grad_bytes * param.elements
                param.grad = self.recorder.tensor(f"{param.name}.grad", "grad", size)
            else:
                read.append(param.grad)
            written.append(param.grad)
        return read, written

    def clip(self) -> None:
        """Gradients are read for their norm, then scaled in place."""
        for param in self.of.values():
            assert param.grad is not None, param.name
            self.recorder.kernel(f"{param.name}.norm", [param.grad], [])
        for param in self.of.values():
            assert param.grad is not None, param.name
            self.recorder.kernel(f"{param.name}.clip", [param.grad], [param.grad])

    def adamw(self) -> None:
        """One fused kernel per parameter."""
        for param in self.of.values():
            assert param.grad is not None, param.name
            own = [] if self.precision.master_bytes else [param.weight]
            reads, writes = [param.grad, *own, *param.states], [*param.states, param.weight]
            self.recorder.kernel(f"{param.name}.adamw", reads, writes)


class Tape:
    """One forward pass; `backward` goes through it in reverse."""

    def __init__(self, recorder: Recorder, weights: Weights, prefix: str, checkpoint: bool) -> None:
        self.recorder, self.weights = recorder, weights
        self.prefix, self.checkpoint = prefix, checkpoint
        self.element_bytes = weights.precision.activation_bytes
        self.entries: list[Callable[[], None]] = []
        self.pending: dict[int, list[int]] = {}  # activation -> gradients that are to be summed
        self.leaves: set[int] = set()  # that need no gradient

    def make(self, name: str, size_bytes: int) -> int:
        return self.recorder.tensor(self.prefix + name, "activation", size_bytes)

    def give(self, activation: int, grad: int) -> None:
        if activation not in self.leaves:
            self.pending.setdefault(activation, []).append(grad)

    def grad(self, activation: int, name: str) -> int:
        """Its gradient in one piece."""
        parts = self.pending.pop(activation)
        if len(parts) == 1:
            return parts[0]
        total = self.make(f"{name}.grad_sum", self.recorder.size(activation))
        self.recorder.kernel(f"{name}.grad_sum", parts, [total])
        return total

    def backward(self) -> None:
        while self.entries:
            self.entries.pop()()

    def linear(
        self, name: str, x: int, params: Sequence[Param], elements: int, flop: int, out: str = ""
    ) -> int:
        """A matrix product (grouped ones too) with or without bias; its backward is two of them."""
        y = self.make(out or f"{name}.out", elements * self.element_bytes)
        self.recorder.kernel(name, [x, *(p.weight for p in params)], [y], flop=flop)

        def back() -> None:
            dy = self.grad(y, name)
            if x not in self.leaves:
                dx = self.make(f"{name}.dx", self.recorder.size(x))
                self.recorder.kernel(f"{name}.dgrad", [dy, params[0].weight], [dx], flop=flop)
                self.give(x, dx)
            read, written = self.weights.grads(params)
            self.recorder.kernel(f"{name}.wgrad", [dy, x, *read], written, flop=flop)

        self.entries.append(back)
        return y

    def norm(self, name: str, x: int, params: Sequence[Param], rows: int) -> int:
        """RMSNorm or LayerNorm; fp32 statistics per row are saved. The residual's gradient joins in its
        backward."""
        y = self.make(f"{name}.out", self.recorder.size(x))
        stats = self.make(f"{name}.stats", 4 * rows * len(params))  # one number, or mean and deviation
        weights = [p.weight for p in params]
        self.recorder.kernel(name, [x, *weights], [y, stats])

        def back() -> None:
            parts, residual = self.pending.pop(y), self.pending.pop(x, [])
            dx = self.make(f"{name}.dx", self.recorder.size(x))
            read, written = self.weights.grads(params)
            reads = [*parts, x, stats, *weights, *residual, *read]
            self.recorder.kernel(f"{name}.backward", reads, [dx, *written])
            self.give(x, dx)

        self.entries.append(back)
        return y

    def elementwise(self, name: str, inputs: Sequence[int], size_bytes: int, *, saves: bool = True) -> int:
        """`saves`: the backward reads the inputs, as an activation function's does and a rotation's not."""
        y = self.make(f"{name}.out", size_bytes)
        self.recorder.kernel(name, inputs, [y])

        def back() -> None:
            parts = self.pending.pop(y)
            wanted = [x for x in inputs if x not in self.leaves]
            made = [self.make(f"{name}.d{i}", self.recorder.size(x)) for i, x in enumerate(wanted)]
            self.recorder.kernel(f"{name}.backward", [*parts, *(inputs if saves else ())], made)
            for x, dx in zip(wanted, made):
                self.give(x, dx)

        self.entries.append(back)
        return y

    def add(self, name: str, a: int, b: int) -> int:
        """A residual. Its backward launches nothing: both sides get the same gradient."""
        y = self.make(f"{name}.out", self.recorder.size(a))
        self.recorder.kernel(name, [a, b], [y])

        def back() -> None:
            dy = self.grad(y, name)
            self.give(a, dy)
            self.give(b, dy)

        self.entries.append(back)
        return y

    def attention(self, name: str, qkv: Sequence[int], out_bytes: int, rows: int, flop: int) -> int:
        """Flash attention: output and one fp32 number per row and head are saved. The backward makes half of
        the product again and works in an fp32 copy of the query's gradient."""
        o = self.make(f"{name}.out", out_bytes)
        lse = self.make(f"{name}.lse", 4 * rows)
        self.recorder.kernel(name, qkv, [o, lse], flop=flop)

        def back() -> None:
            do = self.grad(o, name)
            made = [self.make(f"{name}.d{i}", self.recorder.size(x)) for i, x in enumerate(qkv)]
            workspace = out_bytes // self.element_bytes * 4 + 4 * rows
            self.recorder.kernel(
                f"{name}.backward",
                [do, *qkv, o, lse],
                made,
                flop=flop * 5 // 2,
                workspace_bytes=workspace,
            )
            for x, dx in zip(qkv, made):
                self.give(x, dx)

        self.entries.append(back)
        return o

    def block(self, name: str, x: int, run: Callable[[Tape, int], int]) -> int:
        """A layer. With checkpointing only its input is saved, and the backward runs all of it once more."""
        if not self.checkpoint:
            return run(self, x)
        forward = Tape(self.recorder, self.weights, self.prefix, False)
        y = run(forward, x)

        def back() -> None:
            again = Tape(self.recorder, self.weights, f"{self.prefix}again.", False)
            remade = run(again, x)
            again.pending[remade] = [self.grad(y, name)]
            again.backward()
            for dx in again.pending.pop(x):
                self.give(x, dx)

        self.entries.append(back)
        return y
