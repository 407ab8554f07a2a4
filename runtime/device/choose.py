"""The choice of the device whose memory the budget limits: a GPU if the process can use one, else RAM."""

from __future__ import annotations

import torch

from .cpu import CpuDevice
from .cuda import CudaDevice, reason_without_gpu
from .device import Device


def choose_device(on: str | torch.device | None = None) -> Device:
    """Return the device `on`. If `on` is None, return a GPU if the process can use one, else RAM."""
    requested = None if on is None else torch.device(on)
    if requested is None or requested.type != "cpu":
        if reason_without_gpu() is None:
            return CudaDevice(None if requested is None else requested.index)
        assert requested is None, f"device {requested} was requested: {reason_without_gpu()}"
    return CpuDevice()
