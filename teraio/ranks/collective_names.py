"""Names of collectives: torch's operators for them, and the kernels that the operators become."""

from __future__ import annotations

FUNCTIONAL = "_c10d_functional"  # the namespace of the collectives in compiled programs
NAMESPACES = {FUNCTIONAL, "_c10d_functional_autograd", "c10d", "_dtensor"}
GATHERS = ("all_gather_into_tensor", "all_gather_into_tensor_coalesced")
# A program awaits each functional collective by this operator.
WAIT = "wait_tensor"
_WORDS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "broadcast", WAIT)


def is_collective(kernel: str) -> bool:
    """Return True if this is the name of a collective, or of a wait for a collective."""
    return any(word in kernel for word in _WORDS)


def has_collective(kernels: list[str]) -> bool:
    """Return whether a collective is among the kernels of a program."""
    return any(WAIT in kernel for kernel in kernels)
