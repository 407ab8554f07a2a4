"""Where kernels run later than they are launched, it is the device's clock that says how long they take."""

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
    """One millisecond goes by from each moment to the next."""

    taken = asked = 0

    def moment_after_kernels(self) -> Any:
        OwnClock.taken += 1
        return [OwnClock.taken]

    def moments_in_ns(self, moments: Sequence[Any]) -> list[int]:
        OwnClock.asked += 1
        return [MS * at for (at,) in moments]


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choose, "choose_device", lambda kind=None: OwnClock())
    monkeypatch.setattr(OwnClock, "asked", 0)
    yield
    teraio.reset()


@pytest.mark.parametrize("train", [True, False])
def test_a_profile_has_the_times_of_the_devices_clock(tmp_path: Path, train: bool) -> None:
    path = tmp_path / "own.profile.json"
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {"memory": "1GiB", "inner": "eager", "warmup": 2, "profile": str(path)}
    compiled: Any = torch.compile(model, backend="teraio", options=options)
    asked = []
    for _ in range(5):
        if train:
            compiled(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with torch.no_grad():
                compiled(torch.ones(8, 64))
        asked.append(OwnClock.asked)
    profile = Profile.read(path)
    durations = [kernel.duration_ns for kernel in profile.kernels]
    # Behind a slot's second moment the kernel runs, up to the first moment of the next slot; inference ends
    # when it is seen to come round again, one moment later.
    assert len(durations) > 8 and set(durations[:-1]) == {MS}
    assert durations[-1] == (MS if train else 2 * MS)
    assert teraio.stats()["step_ns"] % MS == 0 < teraio.stats()["step_ns"]
    assert asked[0] == 0, "no one waits for the device within a step"
