"""Tests of the least memory with which a compiled program can run. The expected numbers are sums by hand.

If the computed least memory were too high, teraio would refuse budgets that suffice.
"""

from __future__ import annotations

import torch

from teraio.formats.schedule import MADE, READ, RETURNED, WRITE, Buffer, ProgramKind, Schedule, Slot
from teraio.runtime.ledger.record import Record
from teraio.runtime.step.program import Program

KIB = 1024
LOGITS, WEIGHT, GRAD = 0, 1, 2


def program(
    kind: ProgramKind, *, logits: str = "activation", returned: bool = False
) -> tuple[Program, list[torch.Tensor]]:
    """Return a program with three kernels, and the tensors of its arguments.

    The kernel `loss` reads logits of 30 KiB, which the engine cannot evict. The kernel `matmul` reads a
    weight of 8 KiB, which the engine can evict. During `matmul` the program also holds 50 KiB of temporary
    tensors. The kernel `add` makes a gradient of 8 KiB.
    """
    buffers = (
        Buffer("logits", "argument", 30 * KIB),
        Buffer("weight", "argument", 8 * KIB),
        Buffer("grad", "result", 8 * KIB),
    )
    slots = (
        Slot("enter", (LOGITS, WEIGHT), (0, 0), 0),
        Slot("loss", (LOGITS,), (READ,), 4 * KIB),
        Slot("matmul", (WEIGHT,), (READ,), 50 * KIB),
        Slot("add", (GRAD, WEIGHT), (MADE | READ | WRITE, READ), 0),
        Slot("exit", (LOGITS,), (READ | RETURNED,), 0) if returned else Slot("exit", (), (), 0),
    )
    made = Program(Schedule(kind, buffers, slots))
    tensors = [torch.empty(size * KIB, dtype=torch.uint8) for size in (30, 8)]
    made.bound[LOGITS] = Record(tensors[0].untyped_storage(), "logits", logits, evictable=False)
    made.bound[WEIGHT] = Record(tensors[1].untyped_storage(), "weight", "weight", evictable=True)
    return made, tensors


def test_backward_frees_its_arguments_before_later_kernels() -> None:
    """The backward starts with 40 KiB that the engine cannot evict: 30 KiB of logits and 10 KiB of other
    tensors.

    After the kernel `loss`, the backward frees the logits.
    """
    backward, _ = program("backward")
    assert backward.largest_kernel_need(40 * KIB) == (10 * KIB, 58 * KIB, "matmul")


def test_arguments_count_at_a_kernel_that_uses_them() -> None:
    backward, _ = program("backward")
    backward.stops = backward.stops[:2]
    assert backward.largest_kernel_need(40 * KIB) == (40 * KIB, 4 * KIB, "loss")


def test_arguments_with_other_holders_count_to_the_end() -> None:
    """These arguments count until the program ends, because code outside of the program still refers to them.

    The caller of a forward holds all arguments, a module holds its weights, and user code holds returned
    tensors.
    """
    for kept in (
        program("forward"),
        program("inference"),
        program("backward", logits="weight"),
        program("backward", logits="grad"),
        program("backward", returned=True),
    ):
        assert kept[0].largest_kernel_need(40 * KIB) == (40 * KIB, 58 * KIB, "matmul")


def test_two_arguments_in_one_storage_count_once() -> None:
    """The shared storage counts until the last kernel that uses one of the two arguments."""
    backward, _tensors = program("backward")
    backward.bound[WEIGHT] = backward.bound[LOGITS]
    assert backward.largest_kernel_need(40 * KIB) == (40 * KIB, 50 * KIB, "matmul")
