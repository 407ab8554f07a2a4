"""Plants of missing waits. Each plant removes one wait that orders copies and kernels, and a comparison of
numbers must detect it.

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
    """Begin copies out of the device (`which` True) or into the device (`which` False) while kernels still
    run.
    """
    issue = pinned_host._issue_copy

    def planted(
        copier: Any, stream: Any, mark: Mark, storage: Any, block: Any, out: bool
    ) -> pinned_host.CopyTicket:
        if out is not which:
            return issue(copier, stream, mark, storage, block, out)
        long_ago = torch.cuda.Event()  # an event that is never recorded, so that streams do not wait for it
        return issue(copier, stream, replace(mark, event=long_ago), storage, block, out)

    pinned_host._issue_copy = planted


def evict_waits_not() -> None:
    """Begin the copy out of the device before the kernel that writes the tensor has run."""
    _no_wait_for_kernels(True)


def fetch_waits_not() -> None:
    """Begin the copy into the device before the kernels that used this memory have run."""
    _no_wait_for_kernels(False)


def _replace(name: str, plant: Callable[..., object]) -> None:
    """Replace the device's method `name` by the plant."""
    assert hasattr(cuda.CudaDevice, name), name
    setattr(cuda.CudaDevice, name, plant)


def freed_before_copied() -> None:
    """Free an evicted tensor's memory while the copy out of it still runs."""

    def end_copy_and_free(self: cuda.CudaDevice, pending: Pending) -> None:
        pending.ticket.wait()
        self.drop_bytes(pending.storage)

    _replace("end_copy_and_free", end_copy_and_free)


def used_before_fetched() -> None:
    """Let kernels read a tensor while the copy into its memory still runs."""

    def end_copy_in(self: cuda.CudaDevice, pending: Pending) -> bool:
        pending.ticket.wait()
        return self.give_block_to_storage(pending)

    _replace("end_copy_in", end_copy_in)


def written_while_copied() -> None:
    """Let kernels write to a tensor while the copy out of its memory still runs. The engine later treats this
    copy as valid.
    """

    def end_copy_without_freeing(self: cuda.CudaDevice, pending: Pending) -> None:
        pending.ticket.wait()

    _replace("end_copy_without_freeing", end_copy_without_freeing)


def store_waits_not() -> None:
    """Let the copier's streams read a tensor before the kernel that writes the tensor has run."""
    mark = cuda.CudaDevice.mark_compute_stream
    cuda.CudaDevice.mark_compute_stream = lambda self: replace(mark(self), handle=0)  # type: ignore[method-assign]


def store_fetch_not_awaited() -> None:
    """Let the host continue before a fetch from a file has ended."""

    def end_copy_in(self: cuda.CudaDevice, pending: Pending) -> bool:
        if getattr(pending.ticket, "event", None) is not None:
            self.wait_for_copy(pending.ticket)
        return self.give_block_to_storage(pending)

    _replace("end_copy_in", end_copy_in)


def streams_not_joined() -> None:
    """Let kernels on a newly current stream start without waiting for the previous stream."""

    def current_compute_stream(self: cuda.CudaDevice) -> torch.cuda.Stream:
        with contextlib.suppress(AttributeError):
            self._compute = torch.cuda.current_stream(self.device)
        return self._compute

    cuda.CudaDevice.current_compute_stream = current_compute_stream  # type: ignore[method-assign]


def failed_fetch_not_drained() -> None:
    """Free the memory of a failed fetch while its copies still run."""
    cuda.CudaDevice.wait_for_copies = lambda self: None  # type: ignore[method-assign]


def freed_to_another_stream() -> None:
    """Free memory to the stream on which it was allocated, while the current stream still uses the memory."""

    def resize_storage(self: cuda.CudaDevice, storage: Any, size_bytes: int) -> None:
        storage.resize_(size_bytes)

    _replace("resize_storage", resize_storage)


def side_streams_not_joined() -> None:
    """Remove the order between user code on its own stream and the work before and after that code."""
    cuda.CudaDevice.join_user_streams = lambda self: None  # type: ignore[method-assign]


def not_idle() -> None:
    """Let the host read the result of a copy before the copy has ended."""
    cuda.CudaDevice.wait_until_idle = lambda self: None  # type: ignore[method-assign]
