"""One trial of teraio's own allocator for torch's CPU memory, in its own process. The script prints a JSON
object.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import threading
import time
from typing import Any
from unittest.mock import patch

import counting_allocator
import torch
from torch import nn

import teraio
from teraio import _native
from teraio.runtime.device import cpu, rss
from teraio.runtime.engine import engine
from teraio.runtime.torch_extension import allocator

MIB = 2**20
WIDTH, LAYERS, BATCH = 512, 10, 512
STEPS, LAST = 9, 4
BUDGET = 40 * MIB


def losses(budget: int) -> tuple[list[float], list[tuple[int, int, int]]]:
    """Train some steps, and return the losses and the counts of each step.

    There are three counts: (1) the bytes taken from the system so far, (2) the bytes reused so far, and (3)
    the process's peak in the step. The peak counts only memory that belongs to tensors or that the allocator
    keeps for tensors.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compiled = torch.compile(
        model, backend="teraio", options={"memory": budget, "inner": "eager", "planner": "greedy"}
    )
    found, counts = [], []
    for _ in range(STEPS):
        loss = compiled(torch.randn(BATCH, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        now = _native.spare().counts()
        other = rss.resident_bytes() - now.used_bytes - now.spare_bytes
        counts.append((now.mapped_bytes, now.reused_bytes, rss.peak_bytes() - other))
        rss.reset_peak()
    return found, counts


def end() -> None:
    teraio.reset()
    torch._dynamo.reset()
    gc.collect()


def train() -> dict[str, Any]:
    torch.set_num_threads(1)
    plain, _ = losses(BUDGET * 10)
    end()
    losses(BUDGET)  # this run makes the plan for the next run, and loads the modules that planning needs
    end()
    found, counts = losses(BUDGET)
    assert engine.ENGINE is not None
    foreign = engine.ENGINE.mover.foreign_bytes
    end()
    per_step = [(late - early) // LAST for early, late in zip(counts[-LAST - 1], counts[-1])]
    return {
        "budget": BUDGET,
        "mapped_per_step": per_step[0],
        "reused_per_step": per_step[1],
        "peak": max(peak for _, _, peak in counts[-LAST:]),
        "foreign": foreign,
        "equal": found == plain,
        "after_reset": _native.spare().counts().spare_bytes,
    }


def foreign() -> dict[str, Any]:
    tensors = [torch.randn(MIB // 4) for _ in range(2)]
    digests = [hashlib.sha256(t.numpy().tobytes()).digest() for t in map(torch.clone, tensors)]
    copies = [t.clone() for t in tensors]
    device = cpu.CpuDevice()
    device.limit_tensors_and_spare_memory(8 * MIB)
    before = [_native.spare().holds(t.data_ptr()) for t in tensors]
    used = device.used_bytes()
    for tensor in tensors:  # frees the first memory of the tensors, which came from malloc
        device.drop_bytes(tensor.untyped_storage())
    for tensor, copy in zip(tensors, copies):
        assert device.observer is not None
        block = device.observer.make_empty_block(tensor.untyped_storage())
        device.resize_storage(block, MIB)
        device.observer.give_block_to_storage(tensor.untyped_storage(), block)
        tensor.copy_(copy)
    after = [_native.spare().holds(t.data_ptr()) for t in tensors]
    counted, full = device.used_bytes() - used, rss.resident_bytes()
    device.limit_tensors_and_spare_memory(0)
    same = digests == [hashlib.sha256(t.numpy().tobytes()).digest() for t in tensors]
    del tensors, tensor, block
    return {
        "freed": full - rss.resident_bytes(),
        "before": before,
        "after": after,
        "counted": counted,
        "same": same,
    }


def refused() -> dict[str, Any]:
    """Try to build teraio's allocator in three cases in which this must fail. (1) There is no compiler. (2)
    The compiler fails. (3) Other users can write to the folder. Return the reasons for the failures, and
    measure a device without the allocator.
    """
    tries = {"CXX": "none"}, {"CXX": os.environ["FAILING"]}, {"XDG_CACHE_HOME": os.environ["OTHERS"]}
    reasons = []
    for changed in tries:
        with patch.dict(os.environ, changed):
            reasons.append(allocator._build_and_install())
    with patch.dict(os.environ, tries[0]):
        device = cpu.CpuDevice()
        cpu.CpuDevice()
    tensors = [torch.ones(2 * MIB, dtype=torch.uint8) for _ in range(16)]
    full = rss.resident_bytes()
    used_is_resident = device.used_bytes() > full // 2
    for tensor in tensors[::2] + tensors[1::2]:
        device.drop_bytes(tensor.untyped_storage())
    freed = full - rss.resident_bytes()
    return {"reasons": reasons, "used_is_resident": used_is_resident, "freed": freed}


def fork() -> dict[str, Any]:
    """Fork children from a process in which another thread allocates and frees memory all the time."""
    device = cpu.CpuDevice()
    device.limit_tensors_and_spare_memory(64 * MIB)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            torch.empty(MIB)

    thread = threading.Thread(target=churn)
    thread.start()
    codes = []
    for number in range(20):
        child = os.fork()
        if child == 0:
            tensor = torch.full((MIB,), float(number))
            os._exit(0 if tensor.sum().item() == number * MIB else 1)
        codes.append(wait(child))
        if codes[-1]:
            break
    stop.set()
    thread.join()
    return {"children": codes}


def wait(child: int) -> int:
    """Wait for the child and return its exit code. Kill a child that hangs."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def other() -> dict[str, Any]:
    counting = counting_allocator.install()
    before = counting.alive_bytes()
    installed = allocator.install()
    tensor = torch.empty(MIB, dtype=torch.uint8)
    return {"installed": installed, "counted": counting.alive_bytes() - before, "bytes": tensor.nbytes}


if __name__ == "__main__":
    tries = {"train": train, "foreign": foreign, "refused": refused, "fork": fork, "other": other}
    print(json.dumps(tries[sys.argv[1]]()))
