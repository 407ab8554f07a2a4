"""A builder of profiles. The caller adds tensors and kernels. A roofline gives the duration of each kernel.

    duration = overhead + the larger of   floating point operations / FLOP rate
                                          bytes read and written / memory bandwidth

All numbers are integers and rounded up. The same request therefore gives the same file on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from teraio.formats.profile import Kernel, Kind, Profile, Tensor

# Rates of large kernels on an H100 SXM. (1) The data sheet's dense bf16 rate is 989 TFLOP/s, and kernels
# reach 400 TFLOP/s. Large trainings also report 40 % of the dense rate, for whole steps. (2) The memory
# bandwidth is 3.3 TB/s, and kernels reach 80 %. (3) The time from one kernel launch to the next is 4 us.
FLOP_PER_S = 400 * 10**12
BANDWIDTH_BYTES_PER_S = 2_640 * 10**9
OVERHEAD_NS = 4_000

CHAIN_MAX = 8  # at most this number of kernels recompute one tensor; more would cost more than they save


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds of an accelerator for operands of one width (2 bytes, or more)."""

    flop_per_s: int = FLOP_PER_S
    bandwidth_bytes_per_s: int = BANDWIDTH_BYTES_PER_S
    overhead_ns: int = OVERHEAD_NS

    def duration_ns(self, flop: int, moved_bytes: int) -> int:
        compute_ns = -(-flop * 10**9 // self.flop_per_s)
        memory_ns = -(-moved_bytes * 10**9 // self.bandwidth_bytes_per_s)
        return self.overhead_ns + max(compute_ns, memory_ns)


# Accelerators by the start of a machine's name. The first rates are for operands of two bytes, and the second
# rates for wider operands. Large products reach 40 % of the data sheet's dense bf16 rate. In fp32 they reach
# 75 % of the rate without tensor cores. Kernels reach 80 % of the memory bandwidth.
_TERA, _GIGA = 10**12, 10**9
ACCELERATORS = {
    "h100": (Rates(400 * _TERA, 2_640 * _GIGA), Rates(50 * _TERA, 2_640 * _GIGA)),
    "gb200": (Rates(1_000 * _TERA, 6_400 * _GIGA), Rates(60 * _TERA, 6_400 * _GIGA)),
    "gh200": (Rates(400 * _TERA, 3_200 * _GIGA), Rates(50 * _TERA, 3_200 * _GIGA)),
    "a100": (Rates(180 * _TERA, 1_600 * _GIGA), Rates(15 * _TERA, 1_600 * _GIGA)),
    "rtx4090": (Rates(110 * _TERA, 800 * _GIGA), Rates(62 * _TERA, 800 * _GIGA)),
    "teraio-paper": (Rates(334 * _TERA, 3_100 * _GIGA), Rates(45 * _TERA, 3_100 * _GIGA)),
}


def accelerator_name_in(machine: str) -> str:
    """Return the name in ACCELERATORS with which the machine's name begins, or "" if there is none."""
    return max((each for each in ACCELERATORS if machine.startswith(each)), key=len, default="")


@dataclass(slots=True)
class _TensorRow:
    """A tensor of the step, with the uses added so far."""

    name: str
    kind: Kind
    size_bytes: int
    persistent: bool
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)


class ProfileBuilder:
    """A step under construction. Callers name a tensor by its index. A kernel's tick is its index."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.rows: list[_TensorRow] = []
        self.kernels: list[Kernel] = []
        self.read_by: list[tuple[int, ...]] = []  # by kernel: the tensors that the kernel reads
        self.call = 0
        self.forward: set[int] = set()  # numbers of calls that are forward passes

    def begin_call(self, number: int, forward: bool = False) -> None:
        """Begin a call, to which the next kernels belong.

        If `forward` is True, the call is a forward pass, and its activations can be recomputed.
        """
        self.call = number
        if forward:
            self.forward.add(number)

    def add_tensor(self, name: str, kind: Kind, size_bytes: int, persistent: bool = False) -> int:
        self.rows.append(_TensorRow(name, kind, size_bytes, persistent))
        return len(self.rows) - 1

    def bytes_of_tensor(self, tensor: int) -> int:
        return self.rows[tensor].size_bytes

    def add_kernel(
        self,
        name: str,
        reads: Sequence[int],
        writes: Sequence[int],
        *,
        flop: int = 0,
        moved_bytes: int | None = None,
        workspace_bytes: int = 0,
    ) -> None:
        """Add a kernel. Without `moved_bytes`, the kernel reads and writes its tensors completely.

        `moved_bytes` is for a kernel that touches only a part of its tensors, such as some rows.
        """
        if moved_bytes is None:
            moved_bytes = sum(map(self.bytes_of_tensor, reads)) + sum(map(self.bytes_of_tensor, writes))
        tick = len(self.kernels)
        duration_ns = self.rates.duration_ns(flop, moved_bytes)
        self.kernels.append(Kernel(name, self.call, duration_ns, workspace_bytes))
        self.read_by.append(tuple(reads))
        for tensor in dict.fromkeys(reads):
            self.rows[tensor].reads.append(tick)
        for tensor in dict.fromkeys(writes):
            self.rows[tensor].writes.append(tick)

    def build_profile(self, name: str) -> Profile:
        tensors = tuple(
            Tensor(
                row.name,
                row.kind,
                row.size_bytes,
                row.persistent,
                tuple(row.reads),
                tuple(row.writes),
                self._recompute_chain(row),
            )
            for row in self.rows
        )
        step_ns = sum(kernel.duration_ns for kernel in self.kernels)
        return Profile(name, step_ns, tuple(self.kernels), tensors)

    def _recompute_chain(self, row: _TensorRow) -> tuple[int, ...]:
        """Return the forward kernels that recompute an activation that the forward saves for the backward.

        The first of these kernels read tensors that live at least as long as the activation. Return () in
        three cases:

            - the tensor is not saved
            - several kernels write the tensor, or write a tensor that must be recomputed before
            - more than CHAIN_MAX kernels are necessary
        """
        if row.kind != "activation" or len(row.writes) != 1 or not row.reads:
            return ()
        made, last = row.writes[0], row.reads[-1]
        if self.kernels[made].call not in self.forward or self.kernels[last].call == self.kernels[made].call:
            return ()
        chain, open_ = set(), [made]
        while open_:
            tick = open_.pop()
            chain.add(tick)
            if len(chain) > CHAIN_MAX:
                return ()
            for source in map(self.rows.__getitem__, self.read_by[tick]):
                freed = source.kind == "activation" and source.reads[-1] < last
                if freed and len(source.writes) != 1:
                    return ()
                if freed and source.writes[0] not in chain:
                    open_.append(source.writes[0])
        return tuple(sorted(chain))
