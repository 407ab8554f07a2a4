"""Checks of loops that use several streams, as torch without teraio allows. The numbers must be bitwise
equal.
"""

from __future__ import annotations

from typing import Any

import plants
import torch
from check_loops import digest, same, within
from stack import SIDE

VARIABLES = {"STANDIN_LATE_US": "2000"}
ROWS, STEPS = 256, 8
BUSY = 40  # number of kernels that keep a stream busy, so that its next kernel is late
TIGHT = "4.6MiB"


def batch(step: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, SIDE, generator=drawn).to("cuda")


def averaging(called: Any, model: torch.nn.Module) -> Any:
    """Train, and average the weights on a side stream. Before the optimizer changes the weights, the main
    stream waits for the average of the previous step.
    """
    weights = list(model.parameters())
    optimizer, losses = torch.optim.SGD(weights, lr=0.1), []
    averages = [weight.detach().clone() for weight in weights]
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(main)
    for step in range(STEPS):
        loss = called(batch(step)).square().mean()
        loss.backward()
        main.wait_stream(side)
        optimizer.step()
        optimizer.zero_grad()
        side.wait_stream(main)
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(BUSY):
                averages[0] * 1.0001
            for average, weight in zip(averages, weights):
                average.lerp_(weight, 0.25)
        losses.append(loss.detach())
    torch.cuda.synchronize()
    return losses, averages


def check_averages_on_a_side_stream() -> None:
    same(averaging, memory=TIGHT)


def check_a_missing_join_of_a_side_stream_is_found() -> None:
    plants.side_streams_not_joined()
    try:
        same(averaging, memory=TIGHT)
    except AssertionError as error:
        assert "numbers differ" in str(error)
    else:
        raise AssertionError("the numbers do not differ without the wait")


def check_batches_that_another_stream_makes() -> None:
    """Check a training on its own stream. The model and the batches are made on the default stream.

    The next batches are made while the training runs.
    """

    def loop(called: Any, model: torch.nn.Module) -> Any:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        main, own = torch.cuda.current_stream(), torch.cuda.Stream()
        own.wait_stream(main)
        given = batch(0)
        ready = main.record_event()
        for step in range(STEPS):
            own.wait_event(ready)
            with torch.cuda.stream(own):
                for _ in range(BUSY):
                    given * 1.0001
                loss = called(given).square().mean()
            coming = [torch.full((ROWS, SIDE), 0.1 * step, device="cuda") for _ in range(6)]
            with torch.cuda.stream(own):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            given.record_stream(own)
            ready = main.record_event()
            given = coming[0]
            losses.append(loss.detach())
        torch.cuda.synchronize()
        return losses

    same(loop, memory=TIGHT)


def check_a_new_stream_for_every_step() -> None:
    """Check a training that makes a stream for each step. There are more steps than streams in torch's pool,
    so torch reuses streams.
    """

    def loop(called: Any, model: torch.nn.Module) -> Any:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(40):
            stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                loss = called(batch(step % 4)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            before.wait_stream(stream)
        return losses

    same(loop, memory=TIGHT)


def check_digests_of_different_numbers_differ() -> None:
    with within(False) as (called, model):
        first = digest(called(batch(0)), model.state_dict())
        assert first == digest(called(batch(0)), model.state_dict()) != digest(called(batch(1)))
