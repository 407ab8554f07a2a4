"""Checks of the stand-in with set durations of kernels and copies. Events must measure these durations.

A copy engine must run one copy at a time.
"""

from __future__ import annotations

from typing import Any

import torch

KERNEL_US, GB_S = 500, 0.2
ALONE = True
VARIABLES = {
    "STANDIN_LATE_US": "0",
    "STANDIN_KERNEL_US": str(KERNEL_US),
    "STANDIN_COPY_GB_S": str(GB_S),
    "STANDIN_COMPUTES": "0",
}
COPY_BYTES = 8 << 20
COUNT = 20


def took_ms(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def check_kernels_take_their_time() -> dict[str, Any]:
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    begin, end = events()
    begin.record()
    for _ in range(COUNT):
        x += 1
    end.record()
    found = took_ms(begin, end)
    assert 0.99 < found / (COUNT * KERNEL_US / 1e3) < 1.5, found
    return {"ms": found}


def check_copies_of_one_way_share_an_engine() -> dict[str, Any]:
    """Check that two copies in one direction take twice as long as one copy.

    Check that two copies in opposite directions take as long as one copy.
    """
    a, b = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    p, q = (torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    found = {}
    # Copy once before timing: at the first write to memory, the system allocates the memory's pages.
    p.copy_(a), q.copy_(b), a.copy_(p), b.copy_(q)
    for name, second in {"same": (q, b), "other": (b, q)}.items():
        torch.cuda.synchronize()
        begin, end = events()
        begin.record(one)
        two.wait_event(begin)
        with torch.cuda.stream(one):
            p.copy_(a, non_blocking=True)
        with torch.cuda.stream(two):
            second[0].copy_(second[1], non_blocking=True)
        one.wait_stream(two)
        end.record(one)
        found[name] = took_ms(begin, end) / (COPY_BYTES / GB_S / 1e6)
    assert 1.95 < found["same"] < 3 and 0.99 < found["other"] < 1.9, found
    return found
