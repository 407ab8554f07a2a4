"""Every error a user can meet. A message says what, where, the numbers and the remedy."""

from __future__ import annotations


class TeraioError(RuntimeError):
    """The base of all operating errors; programmer errors are assertions."""


class FileFormatError(TeraioError):
    """A profile, machine, plan, timeline or weight file that cannot be read or written: where, why."""


class CheckpointError(TeraioError):
    """Weights in files that are not those of the model: which, and what differs."""


class OptionError(TeraioError):
    """An option that is unknown, malformed or contradicts another one."""


class BudgetError(TeraioError):
    """The budget is smaller than what one kernel needs; names the kernel and the smallest feasible budget."""


class PlanError(TeraioError):
    """A plan that the independent check refuses, or that no planner could make."""


class UnsupportedError(TeraioError):
    """Something teraio refuses by name instead of doing it wrongly."""


class EvictedError(TeraioError):
    """User code needs an evicted tensor that cannot be fetched; names it and the remedy. Out of an operator
    it comes as the RuntimeError that torch raises, with the same text."""


class TornStepError(TeraioError):
    """An optimizer step could not be completed; the model must be reloaded from its last checkpoint."""


class StoreError(TeraioError):
    """The slow tier failed. `errno` is the system's number or 0; `tensor` names what was being moved."""

    def __init__(self, message: str, *, errno: int = 0, tensor: str = "", path: str = "") -> None:
        super().__init__(message)
        self.errno = errno
        self.tensor = tensor
        self.path = path


class StoreFullError(StoreError):
    """No room: at the start (free space) or in the middle (ENOSPC)."""


class StoreReadError(StoreError):
    """A read failed after its retries."""


class StoreWriteError(StoreError):
    """A write failed after its retries; the copy in memory was kept."""


class CorruptTensorError(StoreError):
    """The bytes that came back are not the bytes that went out (flip, stale or misplaced block)."""


class TransferTimeoutError(StoreError):
    """A transfer did not complete within its deadline; its buffer is quarantined and never used again."""
