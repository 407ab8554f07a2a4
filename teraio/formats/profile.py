"""A profile: one measured step, with its kernels in order and its tensors with the kernels that use them.

A tick is the index of a kernel. A persistent tensor exists in all steps. Any other tensor is created by its
first write and freed after its last use. A tensor of kind `input` exists before the first kernel.

A tensor with `born` lives around the end of the step. The kernel at tick `born` creates it. Its uses before
this tick belong to the next step, and it is freed after the last of them:

    tick       0    1    2    3    4    5    6   |  0    1    2    3
    kernel         [use]         [born]  [use]   |      [use]  freed

An example is a gradient that the next forward reads, because the weight is updated there. Files with such a
tensor have version 2. All other files have version 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from teraio.formats.fields import (
    TICKS_END,
    Fault,
    Field,
    Format,
    ObjectFormat,
    TopLevelKey,
    boolean_complaint,
    make_integer_check,
    make_one_of_check,
    make_safe_text_check,
    refuse_duplicates,
    ticks_complaint,
)
from teraio.formats.files import FileContent
from teraio.units import LIMIT

# Most kernels, and most tensors. A 70B model with 128 micro-batches has 1.5 million kernels.
ENTRIES_MAX = 2**22
# Most reads, writes and recompute ticks of all tensors together. This number limits the memory of the reader.
USES_MAX = 2**24
TENSOR_USES_MAX = 2**16  # limit per tensor, so that its line fits into `json_text.ENTRY_CHARS_MAX`

Kind = Literal["weight", "grad", "state", "activation", "input"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch of a kernel. `call` is the number of the program call that launched it, counted within the
    step.
    """

    name: str
    call: int
    duration_ns: int
    workspace_bytes: int = 0
    p90_ns: int | None = None
    busy_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """One storage, which may have several views. `recompute_from` has the ticks of kernels that can recompute
    its bytes.
    """

    name: str
    kind: Kind
    size_bytes: int
    persistent: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    recompute_from: tuple[int, ...] = ()
    born: int | None = None

    @property
    def outlives_step(self) -> bool:
        """Return True if the tensor exists when the next step begins."""
        return self.persistent or self.born is not None

    def uses_in_order(self, ticks: int) -> list[int]:
        """Return the ticks of all uses, in the order of the tensor's life. A step has `ticks` kernels.

        To a use in the next step, `ticks` is added.
        """
        born = self.born or 0
        return sorted({tick if tick >= born else tick + ticks for tick in (*self.reads, *self.writes)})

    def life(self, ticks: int) -> tuple[int, int]:
        """Return the first tick at which the tensor exists, and the tick after the last one.

        The end may lie in the next step: then `ticks`, the number of kernels of a step, is added. A
        persistent tensor exists at all ticks. Any other tensor without uses has the life (0, 0).
        """
        if self.persistent:
            return 0, ticks
        uses = self.uses_in_order(ticks)
        if not uses:
            return 0, 0
        return 0 if self.kind == "input" else uses[0], uses[-1] + 1

    def is_alive_at(self, tick: int, ticks: int) -> bool:
        """Return True if the tensor exists when the kernel at this tick runs."""
        return is_within_life(self.life(ticks), tick, ticks)


def is_within_life(life: tuple[int, int], tick: int, ticks: int) -> bool:
    """Return True if a life, as `Tensor.life` returns it, contains the tick. A step has `ticks` kernels."""
    first, end = life
    return (tick - first) % ticks < end - first


@dataclass(frozen=True, slots=True)
class Profile(FileContent):
    name: str
    step_ns: int
    kernels: tuple[Kernel, ...]
    tensors: tuple[Tensor, ...]

    @property
    def compute_ns(self) -> int:
        """Return the duration of a step in which compute never waits for a transfer."""
        return sum(kernel.duration_ns for kernel in self.kernels)


def _check_across_fields(profile: Profile) -> None:
    """Refuse duplicate names, impossible ticks, too many uses, and sums of 2**53 and more."""
    refuse_duplicates("tensors", (tensor.name for tensor in profile.tensors), ".name")
    _refuse_large_sum("kernels", "duration_ns", profile.compute_ns)
    _refuse_large_sum("tensors", "size_bytes", sum(tensor.size_bytes for tensor in profile.tensors))
    uses = 0
    for index, tensor in enumerate(profile.tensors):
        _refuse_impossible_ticks(f"tensors[{index}]", tensor, len(profile.kernels))
        own = len(tensor.reads) + len(tensor.writes) + len(tensor.recompute_from)
        if own > TENSOR_USES_MAX:
            raise Fault(f"tensors[{index}]", f"has {own} uses; at most {TENSOR_USES_MAX} are taken")
        uses += own
        if uses > USES_MAX:
            raise Fault(f"tensors[{index}]", f"brings the uses to {uses}; at most {USES_MAX} are taken")


def _refuse_impossible_ticks(path: str, tensor: Tensor, kernels: int) -> None:
    for key in ("reads", "writes", "recompute_from"):
        if (ticks_ := getattr(tensor, key)) and ticks_[-1] >= kernels:
            raise Fault(f"{path}.{key}", f"holds tick {ticks_[-1]}; there are {kernels} kernels")
    if tensor.born is not None:
        _refuse_impossible_birth(path, tensor)
        return
    if tensor.persistent or tensor.kind == "input":
        return
    if not tensor.writes:
        raise Fault(f"{path}.writes", "is empty; only persistent tensors and inputs exist without a write")
    if tensor.reads and tensor.reads[0] < tensor.writes[0]:
        born = tensor.writes[0]
        raise Fault(f"{path}.reads", f"starts at tick {tensor.reads[0]}, before the first write at {born}")


def _refuse_impossible_birth(path: str, tensor: Tensor) -> None:
    if tensor.persistent or tensor.kind == "input":
        what = "persistent" if tensor.persistent else "an input"
        raise Fault(f"{path}.born", f"is {tensor.born}, but the tensor is {what}, so no kernel creates it")
    if tensor.born not in tensor.writes:
        raise Fault(f"{path}.born", f"is {tensor.born}, but the tensor has no write at this tick")
    if min((*tensor.reads, *tensor.writes)) == tensor.born:
        raise Fault(
            f"{path}.born", f"is {tensor.born}, but the tensor has no use before this tick; leave it out"
        )


def _version_of(profile: Profile) -> int:
    return 1 if all(tensor.born is None for tensor in profile.tensors) else 2


def _refuse_large_sum(path: str, key: str, total: int) -> None:
    if total >= LIMIT:
        raise Fault(path, f"{key} adds up to {total}; expected less than 2**53")


Profile.file_format = Format(
    name="teraio-profile",
    size_max_bytes=256 * 2**20,
    build=Profile,
    parts=(
        TopLevelKey("name", "value", check=make_safe_text_check(0)),
        TopLevelKey("step_ns", "value", check=make_integer_check()),
        TopLevelKey(
            "kernels",
            "records",
            ObjectFormat(
                Kernel,
                (
                    Field("name", make_safe_text_check()),
                    Field("call", make_integer_check(end=TICKS_END)),
                    Field("duration_ns", make_integer_check()),
                    Field("workspace_bytes", make_integer_check(), 0),
                    Field("p90_ns", make_integer_check(), None),
                    Field("busy_ns", make_integer_check(), None),
                ),
            ),
            count_max=ENTRIES_MAX,
        ),
        TopLevelKey(
            "tensors",
            "records",
            ObjectFormat(
                Tensor,
                (
                    Field("name", make_safe_text_check()),
                    Field("kind", make_one_of_check(*get_args(Kind))),
                    Field("size_bytes", make_integer_check()),
                    Field("persistent", boolean_complaint),
                    Field("reads", ticks_complaint),
                    Field("writes", ticks_complaint),
                    Field("recompute_from", ticks_complaint, ()),
                    Field("born", make_integer_check(end=TICKS_END), None),
                ),
            ),
            count_max=ENTRIES_MAX,
        ),
    ),
    law=_check_across_fields,
    version=2,
    version_of=_version_of,
)
