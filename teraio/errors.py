"""The errors that teraio raises. A message names the event, the place, the numbers and the remedy."""

from __future__ import annotations


class TeraioError(RuntimeError):
    """The base class of all errors that teraio raises on purpose. A bug in teraio shows as an
    AssertionError.
    """


class FileFormatError(TeraioError):
    """A failed read or write of a profile, machine, plan, timeline or weight file.

    The message names the faulty place in the file, and the reason.
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
    """A plan that is invalid for its step (`plan_check` refuses it), or a budget for which no planner finds a
    plan.
    """


class UnsupportedError(TeraioError):
    """A request that teraio refuses, because it cannot fulfil the request correctly."""


class EvictedError(TeraioError):
    """A use of an evicted tensor that the engine cannot fetch. The message names the tensor and the remedy.

    If a torch operator uses the tensor, torch raises a RuntimeError with the same message instead.
    """


class TornStepError(TeraioError):
    """A loss of weights or optimizer states, for example an optimizer step that failed after some updates.

    Reset teraio, and load the model's last checkpoint.
    """


class RankError(TeraioError):
    """A failure of another rank of the training. The message names the rank, its error and its message.

    The rank could not go on, so this rank would wait for it without end.
    """


class BackwardUpdateError(TeraioError):
    """A loop that breaks an assumption of `updates="backward"`. The message names the line and the tensor.

    If a torch operator uses the tensor, torch raises a RuntimeError with the same message instead.
    """


class StoreError(TeraioError):
    """A failure of the store, which keeps evicted tensors on disk.

    `errno` is the system's error number, or 0. `tensor` names the tensor that was written or read.
    """

    def __init__(self, message: str, *, errno: int = 0, tensor: str = "", path: str = "") -> None:
        super().__init__(message)
        self.errno = errno
        self.tensor = tensor
        self.path = path


class StoreFullError(StoreError):
    """A store without enough space. The engine detects it at the start (too little free space) or during a
    write (ENOSPC).
    """


class StoreReadError(StoreError):
    """A read from the store that failed after all retries."""


class StoreWriteError(StoreError):
    """A write to the store that failed after all retries. The tensor's copy in memory is kept."""


class CorruptTensorError(StoreError):
    """Bytes read from the store that differ from the written bytes.

    Causes are a flipped bit, an old block, or a block at a wrong place.
    """


class TransferTimeoutError(StoreError):
    """A transfer that did not end before its deadline. The engine never uses the transfer's buffer again,
    because the drive may still access it.
    """
