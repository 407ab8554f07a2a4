"""A set-up that runs the real CUDA build of torch without a GPU. Import this module before any code uses the
GPU.

    libcuda.so.1    replaces the driver and libcudart, preloaded (driver/*.cpp)
    operators       ATen's operators on CUDA tensors, by CPU kernels (driver/operators.cpp)
    composed.py     operators that only CUDA has, composed of other operators
    interpreted.py  Triton's kernels, by Triton's interpreter, if TRITON_INTERPRET=1

prove.py makes the environment, builds the two libraries, and sets the environment variables of a process. A
result on the stand-in is not a result of a real GPU.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch

TORCH = "2.11"  # series
CUDA = "13.0"
# Properties that driver/runtime.cpp sets. If torch reads other values, it uses another version of the struct.
EXPECTED = {
    "name": "Stand-in for an H100",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "max_threads_per_multi_processor": 2_048,
    "warp_size": 32,
    "regs_per_multiprocessor": 65_536,
    "shared_memory_per_block_optin": 232_448,
    "L2_cache_size": 50 << 20,
    "pci_bus_id": 1,
}


class StandInError(RuntimeError):
    """An error that explains why this process cannot run on the stand-in."""


def _check_versions() -> None:
    if not torch.__version__.startswith(TORCH + ".") or torch.version.cuda != CUDA:
        raise StandInError(
            f"the stand-in is made for torch {TORCH} with CUDA {CUDA}; this is torch {torch.__version__} "
            f"with CUDA {torch.version.cuda}"
        )
    built = os.environ.get("STANDIN_TORCH")
    if built != torch.version.git_version:
        raise StandInError(
            f"the stand-in was built for torch {built}, this is {torch.version.git_version}; start processes "
            "through prove.py, which rebuilds it when needed"
        )


def _library() -> Any:
    library = ctypes.CDLL(None)
    if not hasattr(library, "standin_report"):
        raise StandInError("libcuda.so.1 of the stand-in is not preloaded; start processes through prove.py")
    for name in ("standin_used", "standin_most", "standin_pinned"):
        getattr(library, name).restype = ctypes.c_size_t
    library.standin_kernels.restype = ctypes.c_long
    library.standin_computes.restype = ctypes.c_bool
    return library


def _check_structs() -> None:
    properties = torch.cuda.get_device_properties(0)
    for name, wanted in EXPECTED.items():
        seen = getattr(properties, name)
        if seen != wanted:
            raise StandInError(f"torch reads {seen!r} as {name} of a device, the stand-in wrote {wanted!r}")
    if properties.total_memory != int(os.environ.get("STANDIN_MIB", "4096")) << 20:
        raise StandInError(f"torch reads {properties.total_memory} bytes as the memory of a device")


def used_bytes(device: int = 0) -> int:
    """Return the number of bytes that are now allocated from the driver."""
    return int(LIBRARY.standin_used(device))


def most_bytes(device: int = 0) -> int:
    """Return the peak number of bytes that were allocated from the driver."""
    return int(LIBRARY.standin_most(device))


def pinned_bytes() -> int:
    return int(LIBRARY.standin_pinned())


def uncomputed_kernels() -> int:
    """Return the number of kernels that were launched but not computed.

    Kernels of Triton are not computed if Triton's interpreter is off.
    """
    return int(LIBRARY.standin_kernels())


def kernels_take(us: float) -> None:
    """Set the least duration of each kernel that is launched from now on."""
    LIBRARY.standin_set_kernel_us(ctypes.c_double(us))


def kernels_compute(they_do: bool) -> None:
    """Set whether operators compute numbers from now on. If not, they only take time."""
    LIBRARY.standin_set_computes(ctypes.c_bool(they_do))


def calls() -> Mapping[str, int]:
    """Return, for each operator, the number of its calls on CUDA tensors."""
    counts: Mapping[str, int] = OPERATORS.calls()
    return counts


def synchronous() -> Mapping[str, int]:
    """Return, for each operator, the number of calls during which the host waited for the stream.

    The host must wait if the sizes of the results depend on the values in a tensor.
    """
    counts: Mapping[str, int] = OPERATORS.synchronous()
    return counts


def over_same_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the bytes of a device tensor. The caller must first wait for the stream."""
    made: torch.Tensor = OPERATORS.over_same_bytes(tensor)
    return made


_check_versions()
LIBRARY = _library()
torch.cuda.init()
_check_structs()
OPERATORS: Any = importlib.import_module("operators")
INSTALLED = int(OPERATORS.install())
importlib.import_module("composed")
if os.environ.get("TRITON_INTERPRET") == "1":
    importlib.import_module("interpreted").install()
torch.backends.cudnn.enabled = False  # the stand-in cannot compute the kernels of cuDNN
if os.environ.get("STANDIN_REPORT"):
    atexit.register(LIBRARY.standin_report)
