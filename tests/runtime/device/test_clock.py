"""Durations of kernels that run after their launch has returned. The device's clock measures them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ram_device import RamDevice
from torch import nn

import teraio
from teraio.formats.profile import Profile
from teraio.runtime.device import choose

MS = 10**6


class OwnClock(RamDevice):
    """A device whose clock advances by one millisecond whenever the engine records a time."""

    taken = reads = 0

    def moment_after_kernels(self) -> Any:
        OwnClock.taken += 1
        return [OwnClock.taken]

    def moments_in_ns(self, moments: Sequence[Any]) -> list[int]:
        OwnClock.reads += 1
        return [MS * at for (at,) in moments]


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choose, "choose_device", lambda kind=None: OwnClock())
    monkeypatch.setattr(OwnClock, "reads", 0)
    yield
    teraio.reset()


@pytest.mark.parametrize("train", [True, False])
def test_a_profile_has_the_times_of_the_devices_clock(tmp_path: Path, train: bool) -> None:
    path = tmp_path / "own.profile.json"
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {"memory": "1GiB", "inner": "eager", "warmup": 2, "profile": str(path)}
    compiled: Any = torch.compile(model, backend="teraio", options=options)
    reads = []
    for _ in range(5):
        if train:
            compiled(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with torch.no_grad():
                compiled(torch.ones(8, 64))
        reads.append(OwnClock.reads)
    profile = Profile.read(path)
    durations = [kernel.duration_ns for kernel in profile.kernels]
    # Each slot records two times. A kernel runs from the second time of its slot to the first time of the
    # next slot. The engine detects the end of an inference step only when the next step begins, which is one
    # time later.
    assert len(durations) > 4 and set(durations[:-1]) == {MS}
    assert durations[-1] == (MS if train else 2 * MS)
    assert teraio.stats()["step_ns"] % MS == 0 < teraio.stats()["step_ns"]
    assert reads[0] == 0, "the engine waited for the device within a step"
