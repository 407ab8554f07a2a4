"""Operators of a network, forward and backward. Each forward operator records its backward kernels.

If an activation has several readers, its gradient has several parts. The kernel that uses the gradient next
decides how the parts are summed. If this kernel is elementwise, it sums the parts itself, as in the code of
fusing compilers. If this kernel is a matrix product, a separate kernel sums the parts first.

The first gradient kernel of a weight makes the gradient. Later kernels add to this gradient in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .roofline import ProfileBuilder


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per element of each kind of tensor.

    If `master_bytes` is 0, there is no master copy, and the optimizer updates the weights directly.
    """

    weight_bytes: int
    grad_bytes: int
    activation_bytes: int
    master_bytes: int
    moment_bytes: int


PRECISIONS = {
    "bf16-mixed": Precision(2, 2, 2, 4, 4),  # weights and gradients in bf16, master copy and moments in fp32
    "bf16": Precision(2, 2, 2, 0, 2),
    "fp32": Precision(4, 4, 4, 0, 4),
}


@dataclass(slots=True)
class Param:
    """A weight, its optimizer states and its gradient. `grad` is None until a kernel makes it."""

    name: str
    elements: int
    weight: int
    states: tuple[int, ...]
    grad: int | None = None


class Weights:
    """All parameters of a model, in the order in which the forward pass first uses them.

    Frozen weights have no gradients and no states, and no kernel updates them.
    """

    def __init__(self, recorder: ProfileBuilder, precision: Precision, frozen: bool = False) -> None:
        self.recorder, self.precision, self.frozen = recorder, precision, frozen
        self.of: dict[str, Param] = {}

    def get_or_add_parameter(self, name: str, elements: int) -> Param:
        if name not in self.of:
            p, make = self.precision, self.recorder.add_tensor
            weight = make(name, "weight", p.weight_bytes * elements, True)
            sizes = (("master", p.master_bytes), ("exp_avg", p.moment_bytes), ("exp_avg_sq", p.moment_bytes))
            states = tuple(
                make(f"{name}.{state}", "state", size * elements, True)
                for state, size in sizes
                if size and not self.frozen
            )
            self.of[name] = Param(name, elements, weight, states)
        return self.of[name]

    def gradients_read_and_written(self, params: Sequence[Param]) -> tuple[list[int], list[int]]:
        """Return the gradients that a kernel reads and writes if it adds to the gradients of these
        parameters.

        The kernel only writes a gradient that does not exist yet. Frozen parameters have no gradients.
        """
        read: list[int] = []
        written: list[int] = []
        for param in () if self.frozen else params:
            if param.grad is None:
                size = self.precision.grad_bytes * param.elements
                param.grad = self.recorder.add_tensor(f"{param.name}.grad", "grad", size)
            else:
                read.append(param.grad)
            written.append(param.grad)
        return read, written

    def add_clip_kernels(self) -> None:
        """Add kernels that compute the norms of all gradients, then kernels that scale the gradients."""
        for param in self.of.values():
            assert param.grad is not None, param.name
            self.recorder.add_kernel(f"{param.name}.norm", [param.grad], [])
        for param in self.of.values():
            assert param.grad is not None, param.name
            self.recorder.add_kernel(f"{param.name}.clip", [param.grad], [param.grad])

    def add_adamw_kernels(self) -> None:
        """Add one fused AdamW kernel per parameter."""
        for param in () if self.frozen else self.of.values():
            assert param.grad is not None, param.name
            own = [] if self.precision.master_bytes else [param.weight]
            reads, writes = [param.grad, *own, *param.states], [*param.states, param.weight]
            self.recorder.add_kernel(f"{param.name}.adamw", reads, writes)


class Tape:
    """One forward pass. `add_backward_kernels` adds the backward of its operators in reverse order."""

    def __init__(self, recorder: ProfileBuilder, weights: Weights, prefix: str, checkpoint: bool) -> None:
        self.recorder, self.weights = recorder, weights
        self.prefix, self.checkpoint = prefix, checkpoint
        self.element_bytes = weights.precision.activation_bytes
        self.entries: list[Callable[[], None]] = []
        self.pending: dict[int, list[int]] = {}  # activation -> parts of its gradient, not yet summed
        self.leaves: set[int] = set()  # activations that need no gradient

    def add_activation(self, name: str, size_bytes: int) -> int:
        return self.recorder.add_tensor(self.prefix + name, "activation", size_bytes)

    def add_gradient_part(self, activation: int, grad: int) -> None:
        if activation not in self.leaves:
            self.pending.setdefault(activation, []).append(grad)

    def sum_gradient_parts(self, activation: int, name: str) -> int:
        """Return the gradient of an activation. Add a kernel that sums the parts, if there are several."""
        parts = self.pending.pop(activation)
        if len(parts) == 1:
            return parts[0]
        total = self.add_activation(f"{name}.grad_sum", self.recorder.bytes_of_tensor(activation))
        self.recorder.add_kernel(f"{name}.grad_sum", parts, [total])
        return total

    def add_backward_kernels(self) -> None:
        while self.entries:
            self.entries.pop()()

    def add_linear(
        self, name: str, x: int, params: Sequence[Param], elements: int, flop: int, out: str = ""
    ) -> int:
        """Add a matrix product, plain or grouped, with or without bias.

        Its backward has two matrix products, or one if the input needs no gradient.
        """
        y = self.add_activation(out or f"{name}.out", elements * self.element_bytes)
        self.recorder.add_kernel(name, [x, *(p.weight for p in params)], [y], flop=flop)

        def add_backward() -> None:
            dy = self.sum_gradient_parts(y, name)
            if x not in self.leaves:
                dx = self.add_activation(f"{name}.dx", self.recorder.bytes_of_tensor(x))
                self.recorder.add_kernel(f"{name}.dgrad", [dy, params[0].weight], [dx], flop=flop)
                self.add_gradient_part(x, dx)
            read, written = self.weights.gradients_read_and_written(params)
            if written:
                self.recorder.add_kernel(f"{name}.wgrad", [dy, x, *read], written, flop=flop)

        self.entries.append(add_backward)
        return y

    def add_norm(self, name: str, x: int, params: Sequence[Param], rows: int) -> int:
        """Add an RMSNorm or LayerNorm, which saves fp32 statistics for each row.

        The backward kernel of the norm also adds the gradient that its input gets through the residual
        connection.
        """
        y = self.add_activation(f"{name}.out", self.recorder.bytes_of_tensor(x))
        stats = self.add_activation(
            f"{name}.stats", 4 * rows * len(params)
        )  # in each row, RMSNorm saves one number, and LayerNorm saves mean and deviation
        weights = [p.weight for p in params]
        self.recorder.add_kernel(name, [x, *weights], [y, stats])

        def add_backward() -> None:
            parts, residual = self.pending.pop(y), self.pending.pop(x, [])
            dx = self.add_activation(f"{name}.dx", self.recorder.bytes_of_tensor(x))
            read, written = self.weights.gradients_read_and_written(params)
            reads = [*parts, x, stats, *weights, *residual, *read]
            self.recorder.add_kernel(f"{name}.backward", reads, [dx, *written])
            self.add_gradient_part(x, dx)

        self.entries.append(add_backward)
        return y

    def add_elementwise(
        self, name: str, inputs: Sequence[int], size_bytes: int, *, saves: bool = True
    ) -> int:
        """Add an elementwise kernel. If `saves` is True, the kernel's backward reads the inputs again.

        `saves` is True for an activation function, and False for a rotation of queries and keys.
        """
        y = self.add_activation(f"{name}.out", size_bytes)
        self.recorder.add_kernel(name, inputs, [y])

        def add_backward() -> None:
            parts = self.pending.pop(y)
            wanted = [x for x in inputs if x not in self.leaves]
            made = [
                self.add_activation(f"{name}.d{i}", self.recorder.bytes_of_tensor(x))
                for i, x in enumerate(wanted)
            ]
            self.recorder.add_kernel(f"{name}.backward", [*parts, *(inputs if saves else ())], made)
            for x, dx in zip(wanted, made):
                self.add_gradient_part(x, dx)

        self.entries.append(add_backward)
        return y

    def add_residual(self, name: str, a: int, b: int) -> int:
        """Add the sum of a residual connection.

        The backward of the sum launches no kernel, because both inputs get the gradient of the output.
        """
        y = self.add_activation(f"{name}.out", self.recorder.bytes_of_tensor(a))
        self.recorder.add_kernel(name, [a, b], [y])

        def add_backward() -> None:
            dy = self.sum_gradient_parts(y, name)
            self.add_gradient_part(a, dy)
            self.add_gradient_part(b, dy)

        self.entries.append(add_backward)
        return y

    def add_attention(self, name: str, qkv: Sequence[int], out_bytes: int, rows: int, flop: int) -> int:
        """Add flash attention, which saves its output and one fp32 number for each row and head.

        The backward has 2.5 times the forward's operations, because it also computes the product of queries
        and keys again. Its workspace holds an fp32 copy of the query's gradient.
        """
        o = self.add_activation(f"{name}.out", out_bytes)
        lse = self.add_activation(f"{name}.lse", 4 * rows)
        self.recorder.add_kernel(name, qkv, [o, lse], flop=flop)

        def add_backward() -> None:
            do = self.sum_gradient_parts(o, name)
            made = [
                self.add_activation(f"{name}.d{i}", self.recorder.bytes_of_tensor(x))
                for i, x in enumerate(qkv)
            ]
            workspace = out_bytes // self.element_bytes * 4 + 4 * rows
            self.recorder.add_kernel(
                f"{name}.backward",
                [do, *qkv, o, lse],
                made,
                flop=flop * 5 // 2,
                workspace_bytes=workspace,
            )
            for x, dx in zip(qkv, made):
                self.add_gradient_part(x, dx)

        self.entries.append(add_backward)
        return o

    def add_layer(self, name: str, x: int, run: Callable[[Tape, int], int]) -> int:
        """Add a layer. `run` adds the kernels of the layer's forward.

        With checkpointing, the forward saves only the layer's input. The backward first runs the layer's
        forward kernels again.
        """
        if not self.checkpoint:
            return run(self, x)
        forward = Tape(self.recorder, self.weights, self.prefix, False)
        y = run(forward, x)

        def add_backward() -> None:
            again = Tape(self.recorder, self.weights, f"{self.prefix}again.", False)
            recomputed = run(again, x)
            again.pending[recomputed] = [self.sum_gradient_parts(y, name)]
            again.add_backward_kernels()
            for dx in again.pending.pop(x):
                self.add_gradient_part(x, dx)

        self.entries.append(add_backward)
        return y
