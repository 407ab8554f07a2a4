"""The waits that keep copies and kernels in order, each to be left out: who compares numbers must see it.

Each entry leaves out one wait of teraio/runtime/device/device.py, cuda.py or pinned_host.py, in this process.
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
    """Lets copies out of the device, or those into it, begin at once, whatever kernels still run."""
    issue = pinned_host._issue_copy

    def planted(
        copier: Any, stream: Any, mark: Mark, storage: Any, place: Any, out: bool
    ) -> pinned_host.CopyTicket:
        if out is not which:
            return issue(copier, stream, mark, storage, place, out)
        long_ago = torch.cuda.Event()  # never recorded: a stream does not wait for it
        return issue(copier, stream, replace(mark, event=long_ago), storage, place, out)

    pinned_host._issue_copy = planted


def evict_waits_not() -> None:
    """The copy out begins before the kernel that writes the tensor has run."""
    _no_wait_for_kernels(True)


def fetch_waits_not() -> None:
    """The copy in begins before the kernels have run that used this memory before."""
    _no_wait_for_kernels(False)


def _replace(name: str, plant: Callable[..., object]) -> None:
    """Put this function in the place of the device's method of that name."""
    assert hasattr(cuda.CudaDevice, name), name
    setattr(cuda.CudaDevice, name, plant)


def freed_before_copied() -> None:
    """Memory of an evicted tensor is given to others while it is still copied."""

    def end_copy_and_free(self: cuda.CudaDevice, pending: Pending) -> None:
        pending.ticket.wait()
        self.drop_bytes(pending.storage)

    _replace("end_copy_and_free", end_copy_and_free)


def used_before_fetched() -> None:
    """Kernels read a tensor while it is still copied in."""

    def end_copy_in(self: cuda.CudaDevice, pending: Pending) -> bool:
        pending.ticket.wait()
        return self.give_block_to_storage(pending)

    _replace("end_copy_in", end_copy_in)


def written_while_copied() -> None:
    """Kernels write to a tensor whose copy is kept while it is still copied out."""

    def end_copy_without_freeing(self: cuda.CudaDevice, pending: Pending) -> None:
        pending.ticket.wait()

    _replace("end_copy_without_freeing", end_copy_without_freeing)


def store_waits_not() -> None:
    """The copier's streams take a tensor before the kernel that writes it has run."""
    mark = cuda.CudaDevice.mark_compute_stream
    cuda.CudaDevice.mark_compute_stream = lambda self: replace(mark(self), handle=0)  # type: ignore[method-assign]


def store_fetch_not_awaited() -> None:
    """The host goes on before a fetch from a file has ended."""

    def end_copy_in(self: cuda.CudaDevice, pending: Pending) -> bool:
        if getattr(pending.ticket, "event", None) is not None:
            self.wait_for_copy(pending.ticket)
        return self.give_block_to_storage(pending)

    _replace("end_copy_in", end_copy_in)


def streams_not_joined() -> None:
    """Kernels of a stream that has become current do not wait for those of the one before."""

    def current_compute_stream(self: cuda.CudaDevice) -> torch.cuda.Stream:
        with contextlib.suppress(AttributeError):
            self._compute = torch.cuda.current_stream(self.device)
        return self._compute

    cuda.CudaDevice.current_compute_stream = current_compute_stream  # type: ignore[method-assign]


def failed_fetch_not_drained() -> None:
    """Memory of a fetch that failed is given to others while its copies still run."""
    cuda.CudaDevice.wait_for_copies = lambda self: None  # type: ignore[method-assign]


def freed_to_another_stream() -> None:
    """Memory goes back to the stream that it was made on, whatever the current one still does with it."""

    def resize_storage(self: cuda.CudaDevice, storage: Any, size_bytes: int) -> None:
        storage.resize_(size_bytes)

    _replace("resize_storage", resize_storage)


def side_streams_not_joined() -> None:
    """User code on a stream of its own is not put behind what was given, nor what comes later behind it."""
    cuda.CudaDevice.join_user_streams = lambda self: None  # type: ignore[method-assign]


def not_idle() -> None:
    """The host reads what was copied out before it is there."""
    cuda.CudaDevice.wait_until_idle = lambda self: None  # type: ignore[method-assign]
