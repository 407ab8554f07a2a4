"""Checks of the stand-in, which replaces the GPU's driver and computes on the CPU.

They check its delayed streams, its fresh memory, copies, limits and durations. The host must run ahead of the
streams.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

import standin
import torch

VARIABLES = {"STANDIN_LATE_US": "10000", "STANDIN_DEVICES": "2", "STANDIN_MIB": "256"}
MIB = 1 << 20
USES_A_DESTROYED_STREAM = """
import ctypes, standin, torch
torch.zeros(1, device="cuda")
driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert driver.cuStreamCreate(ctypes.byref(handle), 1) == 0
stream = torch.cuda.ExternalStream(handle.value)
stream.synchronize()
assert driver.cuStreamDestroy_v2(handle) == 0
stream.synchronize()
"""


def check_fresh_memory_is_no_number() -> None:
    assert set(torch.empty(MIB, dtype=torch.uint8, device="cuda").cpu().tolist()) == {0xDD}


def check_the_host_runs_ahead() -> dict[str, Any]:
    """Check that the host launches a hundred kernels in less time than the kernels take.

    A copy that does not wait for them must read wrong numbers.
    """
    x = torch.zeros(MIB, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(100):
        x += 1
    given_s = time.perf_counter() - began
    early = torch.empty(MIB, pin_memory=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        early.copy_(x, non_blocking=True)
    side.synchronize()
    torch.cuda.synchronize()
    took_s = time.perf_counter() - began
    assert float(x[0]) == 100.0 and float(early[0]) < 100.0
    assert given_s < took_s / 2, (given_s, took_s)
    return {"given_s": round(given_s, 4), "took_s": round(took_s, 4)}


def check_pageable_memory_is_copied_at_once() -> None:
    """Check that the host may overwrite a pageable source as soon as the copy call has returned.

    If it overwrites a pinned source so early, the copy must sometimes read the new numbers.
    """
    target, other = (torch.empty(MIB, device="cuda") for _ in range(2))
    pageable, pinned = torch.ones(MIB), torch.ones(MIB).pin_memory()
    wrong = 0
    for _ in range(8):
        target.copy_(pageable.fill_(1), non_blocking=True)
        other.copy_(pinned.fill_(1), non_blocking=True)
        pinned.fill_(2)
        pageable.fill_(2)
        torch.cuda.synchronize()
        assert float(target[0]) == 1.0
        wrong += float(other[0]) != 1.0
    assert wrong, "a pinned source was never read late"


def check_a_full_device_refuses() -> None:
    held = []
    try:
        while True:
            held.append(torch.empty(16 * MIB, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        assert 12 <= len(held) <= 16, len(held)
    assert standin.most_bytes() <= 256 * MIB


def check_devices_have_their_own_memory() -> None:
    one = torch.full((4 * MIB,), 3, dtype=torch.uint8, device="cuda:1")
    assert standin.used_bytes(1) >= 4 * MIB > standin.used_bytes(0)
    assert torch.cuda.current_device() == 0
    assert set(one.to("cuda:0").cpu().tolist()) == {3}


def check_numbers_follow_the_seed() -> None:
    def drawn() -> list[float]:
        torch.manual_seed(5)
        first = torch.randn(8, device="cuda")
        return torch.nn.functional.dropout(first, 0.5).cpu().tolist() + torch.rand(8, device="cuda").tolist()

    once = drawn()
    assert once == drawn() and len(set(once[-8:])) == 8


def check_results_equal_the_cpus() -> None:
    torch.set_num_threads(1)  # one thread, so that the CPU sums in the same order as a stream's thread
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.GELU())
    x = torch.randn(16, 32)
    expected = torch.autograd.grad(layer(x).square().mean(), list(layer.parameters()))
    layer.cuda()
    found = torch.autograd.grad(layer(x.cuda()).square().mean(), list(layer.parameters()))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected))


def check_use_of_a_destroyed_stream_aborts() -> None:
    """Check that the stand-in aborts if a destroyed stream is used. With the real driver, the behaviour is
    undefined.
    """
    command = [sys.executable, "-c", USES_A_DESTROYED_STREAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGABRT, done
    assert "was destroyed" in done.stderr, done.stderr
