"""The choice of the device: a GPU where one works, else RAM."""

from __future__ import annotations

import torch

from .cpu import CpuDevice
from .cuda import CudaDevice, reason_without_gpu
from .device import Device


def choose_device(on: str | torch.device | None = None) -> Device:
    """The device of this process: `cuda` where one works, else `cpu`; or the one asked for."""
    asked = None if on is None else torch.device(on)
    if asked is None or asked.type != "cpu":
        if reason_without_gpu() is None:
            return CudaDevice(None if asked is None else asked.index)
        assert asked is None, f"asked for {asked}: {reason_without_gpu()}"
    return CpuDevice()
