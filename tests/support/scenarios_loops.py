"""Scenarios with special code inside a forward, special batches, and special orders of forwards and
backwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from scenarios import ROWS, WIDTH, Net, Run, scenario, sgd, with_between
from torch import nn
from torch.utils.checkpoint import checkpoint

# ---- code in a forward


@with_between
def dropout(x: torch.Tensor, block: nn.Module) -> torch.Tensor:
    return F.dropout(x, 0.2)


@with_between
def random_numbers(x: torch.Tensor, block: nn.Module) -> torch.Tensor:
    return x + torch.randn_like(x) * torch.bernoulli(torch.full_like(x, 0.5)) * torch.rand(WIDTH)


@with_between
def graph_breaks(x: torch.Tensor, block: nn.Module) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x.sin()


@with_between
def eager_code_that_reads_weights(x: torch.Tensor, block: Any) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x * float(block.up.weight.abs().max()) + block.down.bias


@with_between
def views_and_writes_in_place(x: torch.Tensor, block: Any) -> torch.Tensor:
    y = x.clone()
    y[:, ::2].mul_(2).add_(x[:, 1::2])
    y.transpose(0, 1)[3:5].zero_()
    return y.view(2, -1, WIDTH).flip(0).reshape(x.shape).tanh() + block.up.weight[:WIDTH].t().sum(0)


@with_between
def complex_numbers(x: torch.Tensor, block: nn.Module) -> torch.Tensor:
    spectrum = torch.fft.rfft(x, dim=1)
    spectrum = spectrum * torch.polar(torch.ones_like(spectrum.real), spectrum.real.tanh())
    return torch.fft.irfft(spectrum, n=WIDTH, dim=1).tanh() + torch.view_as_real(spectrum).tanh().mean()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * x.cos()


@with_between
def a_function_with_its_own_backward(x: torch.Tensor, block: nn.Module) -> torch.Tensor:
    return Double.apply(x)


@with_between
def such_a_function_in_eager_code(x: torch.Tensor, block: nn.Module) -> torch.Tensor:
    torch._dynamo.graph_break()
    x = Double.apply(x)
    torch._dynamo.graph_break()
    return x


@with_between
def autocast(x: torch.Tensor, block: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x + block.down(F.gelu(block.up(x))).float()


def checkpointed(reentrant: bool) -> Callable[[Run], None]:
    def between(x: torch.Tensor, block: nn.Module) -> torch.Tensor:
        y = checkpoint(lambda y: F.dropout(block(y), 0.1), x, use_reentrant=reentrant)
        assert isinstance(y, torch.Tensor)
        return y

    between.__name__ = f"checkpointing_{'' if reentrant else 'not_'}reentrant"
    return with_between(between)


checkpointed(False)
checkpointed(True)


# ---- batches


@scenario
def a_short_last_batch(run: Run) -> None:
    model = Net()
    run.loop(model, run.compile(model), (ROWS, ROWS, ROWS, 300, ROWS, ROWS, 300))


@scenario
def batches_of_any_size(run: Run) -> None:
    model = Net()
    run.loop(model, run.compile(model, dynamic=True), (1000, 700, 1024, 64, 1024))


@scenario
def autocast_around_the_model(run: Run) -> None:
    model = Net()
    compiled = run.compile(model)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return compiled(x).float()

    # Twice as many rows, because autocast halves the bytes of each activation.
    run.loop(model, forward, (2 * ROWS,) * 4)


# ---- the loop


@scenario
def gradient_accumulation(run: Run) -> None:
    model = Net()
    compiled, optimizer = run.compile(model), sgd(model)
    for _ in range(3):
        for _ in range(2):
            (compiled(run.batch()).square().mean() / 3).backward()
        run.step(model, compiled(run.batch()).square().mean() / 3, optimizer)


@scenario
def evaluation_in_between(run: Run) -> None:
    model = Net(lambda x, block: F.dropout(x, 0.1, block.training))
    compiled, optimizer = run.compile(model), sgd(model)
    for _ in range(4):
        run.step(model, compiled(run.batch()).square().mean(), optimizer)
        model.eval()
        with torch.no_grad():
            run.see(compiled(run.batch()))
        model.train()
        loss = compiled(run.batch()).square().mean()
        with torch.no_grad():
            run.see(compiled(run.batch(64)))  # an evaluation between a forward and its backward
        run.step(model, loss, optimizer)


@scenario
def inference_alone(run: Run) -> None:
    model = Net().eval().requires_grad_(False)
    compiled = run.compile(model)
    for _ in range(4):
        run.see(compiled(run.batch()))


@scenario
def clipping_a_schedule_and_states(run: Run) -> None:
    model = Net()
    compiled = run.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(4):
        loss = compiled(run.batch()).square().mean()
        loss.backward()
        run.see(loss, nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=False)
        run.see_model(model)


@scenario
def a_closure_that_runs_within_the_optimizer(run: Run) -> None:
    model = Net()
    compiled, optimizer = run.compile(model), sgd(model)
    for _ in range(4):
        x = run.batch()

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = compiled(x).square().mean()
            loss.backward()
            return loss

        run.see(optimizer.step(closure))  # type: ignore[arg-type]
        run.see_model(model)


@scenario
def two_models_and_two_optimizers(run: Run) -> None:
    one, other = Net(), Net(lambda x, block: x.tanh())
    first, second = run.compile(one), run.compile(other)
    optimizers = sgd(one), sgd(other)
    for _ in range(4):
        fake = first(run.batch())
        run.step(other, second(fake.detach()).square().mean(), optimizers[1])
        run.step(one, second(fake).mean(), optimizers[0])
        optimizers[1].zero_grad()


@scenario
def frozen_weights(run: Run) -> None:
    model = Net()
    for block in model.blocks[1::2]:
        block.requires_grad_(False)
    run.loop(model, run.compile(model))


# ---- unpaired forwards and backwards


@scenario
def a_second_backward(run: Run) -> None:
    model = Net()
    compiled, optimizer = run.compile(model), sgd(model)
    for _ in range(4):
        loss = compiled(run.batch()).square().mean()
        loss.backward(retain_graph=True)
        run.see_model(model)
        run.step(model, loss, optimizer)


@scenario
def a_backward_through_a_backward(run: Run) -> None:
    """Check that a double backward raises an error, and that training continues afterwards. The inner backend
    does not support a double backward.
    """
    model = Net()
    compiled = run.compile(model)
    x = run.batch().requires_grad_()

    def penalty() -> None:
        (gradient,) = torch.autograd.grad(compiled(x).square().mean(), x, create_graph=True)
        gradient.square().sum().backward()

    run.fails(penalty)
    model.zero_grad()
    run.loop(model, compiled)


@scenario
def a_forward_without_a_backward(run: Run) -> None:
    model = Net()
    compiled, optimizer = run.compile(model), sgd(model)
    for number in range(5):
        if number in {1, 3}:
            run.see(compiled(run.batch()).sum())
        run.step(model, compiled(run.batch()).square().mean(), optimizer)


@scenario
def two_forwards_and_one_backward(run: Run) -> None:
    model = Net()
    compiled, optimizer = run.compile(model), sgd(model)
    for _ in range(4):
        first, second = compiled(run.batch(512)), compiled(run.batch(512))
        run.step(model, (first * second).mean(), optimizer)


@scenario
def the_later_forward_goes_back_last(run: Run) -> None:
    model = Net()
    compiled, optimizer = run.compile(model), sgd(model)
    for _ in range(4):
        first, second = compiled(run.batch(512)).square().mean(), compiled(run.batch(512)).mean()
        first.backward()
        run.step(model, second, optimizer)


@scenario
def one_shape_too_many(run: Run) -> None:
    """Train with more shapes than Dynamo's recompile limit allows. Further shapes run as plain Python."""
    model = Net()
    run.options = {**run.options, "memory": "5MiB"}  # a budget too small for all weights
    with torch._dynamo.config.patch(recompile_limit=2):
        run.loop(model, run.compile(model, dynamic=False), (32, 64, 96, 64, 32, 128, 96))


@scenario
def a_backward_in_a_compiled_function(run: Run) -> None:
    """Call backward inside a compiled function. Dynamo breaks the graph at this call, and inspects the
    functions that the backward calls.
    """
    model = Net()
    optimizer = sgd(model)

    def forward_and_backward(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    both = run.compile(forward_and_backward)
    for _ in range(4):
        run.see(both(run.batch()))
        run.see_model(model)
        optimizer.step()
        optimizer.zero_grad()
