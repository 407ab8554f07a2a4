"""Functions that each remove one wait for copies or kernels (plants of a fault). A comparison of numbers must
detect the missing wait.

Each plant patches teraio/runtime/device/device.py, cuda.py or pinned_host.py in this process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from teraio.runtime.device import cuda, pinned_host
from teraio.runtime.device.pending_transfer import Mark, Pending


def _no_wait_for_kernels(which: bool) -> None:
    """Let copies begin while kernels still run: copies out of the device if `which` is True, else copies into
    it.
    """
    issue = pinned_host._issue_copy

    def planted(
        copier: Any, stream: Any, mark: Mark, storage: Any, block: Any, out: bool
    ) -> pinned_host.CopyTicket:
        if out is not which:
            return issue(copier, stream, mark, storage, block, out)
        # An event that is never recorded. A stream does not wait for such an event.
        long_ago = torch.cuda.Event()
        return issue(copier, stream, replace(mark, event=long_ago), storage, block, out)

    pinned_host._issue_copy = planted


def evict_waits_not() -> None:
    """Let the copy out of the device begin before the kernel that writes the tensor has ended."""
    _no_wait_for_kernels(True)


def fetch_waits_not() -> None:
    """Let the copy into the device begin before the kernels that used this memory have ended."""
    _no_wait_for_kernels(False)


def _replace(name: str, plant: Callable[..., object]) -> None:
    """Replace the method `name` of CudaDevice by the function `plant`."""
    assert hasattr(cuda.CudaDevice, name), name
    setattr(cuda.CudaDevice, name, plant)


def freed_before_copied() -> None:
    """Free the memory of an evicted tensor while the copy of its bytes to the host still runs."""

    def end_copy_and_free(self: cuda.CudaDevice, pending: Pending) -> None:
        pending.ticket.wait()
        self.drop_bytes(pending.storage)

    _replace("end_copy_and_free", end_copy_and_free)


def used_before_fetched() -> None:
    """Let kernels read a fetched tensor while the copy into its memory still runs."""

    def end_copy_in(self: cuda.CudaDevice, pending: Pending) -> bool:
        pending.ticket.wait()
        return self.return_bytes(pending.storage, pending.block)

    _replace("end_copy_in", end_copy_in)


def written_while_copied() -> None:
    """Let kernels write to a tensor while the copy of its bytes to the host still runs.

    The engine later fetches this copy, although it may contain new and old bytes.
    """

    def end_copy_without_freeing(self: cuda.CudaDevice, pending: Pending) -> None:
        pending.ticket.wait()

    _replace("end_copy_without_freeing", end_copy_without_freeing)


def store_waits_not() -> None:
    """Let the store read a tensor on the device before the kernel that writes the tensor has ended."""
    mark = cuda.CudaDevice.mark_compute_stream
    cuda.CudaDevice.mark_compute_stream = lambda self: replace(mark(self), handle=0)  # type: ignore[method-assign]


def store_fetch_not_awaited() -> None:
    """Let the host continue before a fetch from the store has ended."""

    def end_copy_in(self: cuda.CudaDevice, pending: Pending) -> bool:
        if getattr(pending.ticket, "event", None) is not None:
            self.wait_for_copy(pending.ticket)
        return self.return_bytes(pending.storage, pending.block)

    _replace("end_copy_in", end_copy_in)


def streams_not_joined() -> None:
    """Let kernels on a new current stream start before the kernels on the previous stream have ended."""

    def current_compute_stream(self: cuda.CudaDevice) -> torch.cuda.Stream:
        with contextlib.suppress(AttributeError):
            self._compute = torch.cuda.current_stream(self.device)
        return self._compute

    cuda.CudaDevice.current_compute_stream = current_compute_stream  # type: ignore[method-assign]


def failed_fetch_not_drained() -> None:
    """Free the memory of a failed fetch while some of its copies still run."""
    cuda.CudaDevice.wait_for_copies = lambda self: None  # type: ignore[method-assign]


def freed_to_another_stream() -> None:
    """Free memory although the current stream still uses it. The stream on which the memory was allocated may
    then reuse it.
    """

    def resize_storage(self: cuda.CudaDevice, storage: Any, size_bytes: int) -> None:
        storage.resize_(size_bytes)

    _replace("resize_storage", resize_storage)


def side_streams_not_joined() -> None:
    """Let user code on a stream of its own run at the same time as the work before and after it."""
    cuda.CudaDevice.join_user_streams = lambda self: None  # type: ignore[method-assign]


def not_idle() -> None:
    """Let the host read the target of a copy before the copy has ended."""
    cuda.CudaDevice.wait_until_idle = lambda self: None  # type: ignore[method-assign]
