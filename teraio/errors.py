"""The errors that teraio raises. A message names the event, the place, the numbers and the remedy."""

from __future__ import annotations


class TeraioError(RuntimeError):
    """The base class of all operating errors. Programming errors are assertions."""


class FileFormatError(TeraioError):
    """A failed read or write of a profile, machine, plan, timeline or weight file.

    The message names the place in the file and the reason.
    """


class CheckpointError(TeraioError):
    """Weight files that do not match the model. The message names the weights and the difference."""


class OptionError(TeraioError):
    """An unknown or malformed option, or an option that contradicts another option."""


class BudgetError(TeraioError):
    """A budget that is smaller than the memory that one kernel needs.

    The message names the kernel and the smallest feasible budget.
    """


class PlanError(TeraioError):
    """A plan that `plan_check` refuses, or a budget for which no planner finds a plan."""


class UnsupportedError(TeraioError):
    """A request that teraio refuses, because teraio cannot fulfil the request correctly."""


class EvictedError(TeraioError):
    """A use of an evicted tensor that the engine cannot fetch. The message names the tensor and the remedy.

    If an operator uses the tensor, torch raises a RuntimeError with the same text.
    """


class TornStepError(TeraioError):
    """An optimizer step that failed before its end. Reload the model from its last checkpoint."""


class StoreError(TeraioError):
    """A failure of the slow tier.

    `errno` is the system's error number, or 0. `tensor` names the moved tensor.
    """

    def __init__(self, message: str, *, errno: int = 0, tensor: str = "", path: str = "") -> None:
        super().__init__(message)
        self.errno = errno
        self.tensor = tensor
        self.path = path


class StoreFullError(StoreError):
    """A full store, detected at the start (too little free space) or during a write (ENOSPC)."""


class StoreReadError(StoreError):
    """A read from the store that failed after all retries."""


class StoreWriteError(StoreError):
    """A write to the store that failed after all retries. The copy in memory is kept."""


class CorruptTensorError(StoreError):
    """Bytes read from the store that differ from the written bytes (a flipped bit, a stale block or a
    misplaced block).
    """


class TransferTimeoutError(StoreError):
    """A transfer that missed its deadline. Its buffer is quarantined and never used again."""
