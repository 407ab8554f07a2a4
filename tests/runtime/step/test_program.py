"""What a program needs at least, worked out by hand: a budget that would do must not be refused."""

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
    """A kernel reads logits of 30 KiB that cannot move, the next one a weight of 8 KiB that can; that makes a
    gradient of 8 KiB and takes 50 KiB for itself."""
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


def test_a_backward_has_let_its_arguments_go_when_a_later_kernel_runs() -> None:
    """They, and other things of 10 KiB, cannot move when it begins."""
    backward, _ = program("backward")
    assert backward.largest_kernel_need(40 * KIB) == (10 * KIB, 58 * KIB, "matmul")


def test_a_kernel_that_uses_them_still_has_them() -> None:
    backward, _ = program("backward")
    backward.stops = backward.stops[:2]
    assert backward.largest_kernel_need(40 * KIB) == (40 * KIB, 4 * KIB, "loss")


def test_what_stays_with_someone_counts_to_the_end() -> None:
    """A forward's caller holds the arguments, a module its weights, and what is returned is the user's."""
    for kept in (
        program("forward"),
        program("inference"),
        program("backward", logits="weight"),
        program("backward", logits="grad"),
        program("backward", returned=True),
    ):
        assert kept[0].largest_kernel_need(40 * KIB) == (40 * KIB, 58 * KIB, "matmul")


def test_two_arguments_in_one_storage_count_once() -> None:
    """And as long as either is used."""
    backward, _tensors = program("backward")
    backward.bound[WEIGHT] = backward.bound[LOGITS]
    assert backward.largest_kernel_need(40 * KIB) == (40 * KIB, 50 * KIB, "matmul")
