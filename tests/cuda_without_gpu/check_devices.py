"""Checks of a process with two GPUs. The session must use the device of the first graph, even if torch's
current device is another one.
"""

from __future__ import annotations

from typing import Any

import torch
from stack import SIDE, Model

import teraio
from teraio.backend import backend
from teraio.errors import UnsupportedError
from teraio.session import session

VARIABLES = {"STANDIN_DEVICES": "2"}
OPTIONS: dict[str, Any] = {
    "memory": "5MiB",
    "host_memory": "64MiB",
    "inner": "eager",
    "planner": "greedy",
}
ONE = torch.device("cuda", 1)


def made(device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    return Model().to(device)


def trained(called: Any, model: torch.nn.Module, device: torch.device, steps: int = 9) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(steps):
        drawn = torch.Generator().manual_seed(step)
        loss = called(torch.randn(64, SIDE, generator=drawn).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        assert torch.cuda.current_device() == 0, "the current device changed"
    return losses


def compiled(model: torch.nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=backend, dynamic=False, options={**OPTIONS, **options})


def ended() -> None:
    teraio.reset()
    torch._dynamo.reset()


def refused(call: Any, *names: str) -> None:
    try:
        call()
    except UnsupportedError as error:
        assert all(name in str(error) for name in names), error
        return
    raise AssertionError("not refused")


def _trains_on_the_second(**options: Any) -> None:
    assert torch.cuda.device_count() >= 2, "this check needs two devices"
    model = made(ONE)
    plain = trained(model, model, ONE)
    before = torch.cuda.memory_stats(0).get("allocated_bytes.all.allocated", 0)
    model = made(ONE)
    try:
        ours = trained(compiled(model, **options), model, ONE)
        assert ours == plain, (ours, plain)
        assert session.SESSION is not None
        device: Any = session.SESSION.device
        assert device.device == ONE and device.evict_stream.device == ONE
        assert device.used_bytes() == torch.cuda.memory_allocated(1)
        assert teraio.stats()["evictions"] and (teraio.stats()["fetches"] or "optimizer_step" in options)
        after = torch.cuda.memory_stats(0).get("allocated_bytes.all.allocated", 0)
        assert after == before, "the other device was used"
    finally:
        ended()


def check_the_budget_of_a_model_on_the_second_device() -> None:
    _trains_on_the_second()


def check_the_ssd_serves_the_second_device() -> None:
    """Check evictions to the SSD from the second device. The store's copier needs streams of this device."""
    _trains_on_the_second(host_memory="min")


def check_a_step_on_the_host_of_a_model_on_the_second_device() -> None:
    _trains_on_the_second(optimizer_step="host")


def check_a_second_model_on_another_device_is_refused() -> None:
    first, second = made(torch.device("cuda", 0)), made(ONE)
    try:
        trained(compiled(first), first, torch.device("cuda", 0), steps=2)
        x = torch.randn(64, SIDE, device=ONE)
        refused(lambda: compiled(second)(x), "cuda:0", "cuda:1", "teraio.reset()")
        trained(compiled(first), first, torch.device("cuda", 0), steps=2)
    finally:
        ended()
    try:
        trained(compiled(second), second, ONE, steps=2)  # after the reset, another device works
    finally:
        ended()


def check_a_graph_on_two_devices_is_refused() -> None:
    class Split(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(SIDE, SIDE).to("cuda:0")
            self.two = torch.nn.Linear(SIDE, SIDE).to("cuda:1")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x).to("cuda:1"))

    def moves(x: torch.Tensor) -> torch.Tensor:
        return x.sin().to("cuda:1").cos().sum()

    x = torch.randn(4, SIDE, device="cuda:0")
    try:
        refused(lambda: compiled(Split())(x), "cuda:0", "cuda:1", "Put the model on one device")
        refused(lambda: torch.compile(moves, backend=backend, options=OPTIONS)(x), "cuda:0", "cuda:1")
    finally:
        ended()


def check_a_model_is_made_on_the_second_device_within_the_budget() -> None:
    try:
        with torch.device("cuda:1"), teraio.init(**OPTIONS):
            model = Model()
        assert {weight.device for weight in model.parameters()} == {ONE}
        assert session.SESSION is not None and session.SESSION.device.device == ONE
    finally:
        ended()
