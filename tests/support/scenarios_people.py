"""Scenarios of things that people do to a model: hooks, functional calls, copies, single blocks, and
errors.
"""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from scenarios import BLOCKS, ROWS, WIDTH, Block, Net, Run, scenario, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

# ---- hooks


@scenario
def hooks_on_weights(run: Run) -> None:
    model = Net()
    first = model.blocks[0].get_parameter("up.weight")
    first.register_hook(lambda gradient: gradient * 2 + first.detach().mean())

    def decay(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5).add_(parameter.detach(), alpha=0.01)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(decay)
    run.loop(model, run.compile(model))


class Loss(torch.Tensor):
    """A tensor subclass. If an argument has this class, torch does not call the classes of the other
    arguments.
    """


@scenario
def hooks_of_a_loss_that_has_a_class_of_its_own(run: Run) -> None:
    model = Net()
    run.options = {**run.options, "memory": "5MiB"}  # a budget too small for all weights
    compiled, optimizer = run.compile(model), sgd(model)
    weights = list(model.parameters())
    weights[0].register_hook(lambda gradient: gradient + sum(w.detach().mean() for w in weights))
    for _ in range(6):
        x = checkpoint(Block.forward, model.blocks[1], compiled(run.batch(32)), use_reentrant=False)
        assert isinstance(x, torch.Tensor)
        run.step(model, x.square().mean().as_subclass(Loss), optimizer)


@scenario
def a_callback_after_a_gradient_dies(run: Run) -> None:
    model = Net()
    run.options = {**run.options, "memory": "5MiB"}
    compiled, optimizer = run.compile(model), sgd(model)
    weights, waiting = list(model.parameters()), []
    for _ in range(6):
        loss = compiled(run.batch(32)).square().mean()
        loss.backward()
        assert weights[0].grad is not None
        waiting.append(weakref.ref(weights[0].grad, lambda _: run.see(*weights)))
        optimizer.step()
        optimizer.zero_grad()
    run.see(len(waiting))


@scenario
def hooks_on_modules(run: Run) -> None:
    model = Net()
    compiled = run.compile(model)
    model.blocks[1].register_forward_pre_hook(lambda block, given: (given[0] * 1.5,))
    model.blocks[2].register_forward_hook(lambda block, given, result: result.tanh())
    compiled.register_forward_hook(lambda block, given, result: run.see(result))
    model.register_full_backward_hook(lambda block, inner, outer: run.see(*outer))
    run.loop(model, compiled)


@scenario
def an_optimizer_step_in_the_backward(run: Run) -> None:
    """Use one optimizer per weight, which steps as soon as the weight's gradient exists."""
    model = Net()
    compiled = run.compile(model)
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def update(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(4):
        loss = compiled(run.batch()).square().mean()
        loss.backward()
        run.see(loss)
        run.see_model(model)


# ---- batches from other processes


class Rows(Dataset[torch.Tensor]):
    """A dataset with the same rows in every process."""

    def __len__(self) -> int:
        return 3 * ROWS

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))


def _loader(run: Run, how: str, workers: int, epochs: int) -> None:
    """Train on batches of a DataLoader. In each epoch the loader starts its workers again, while weights,
    gradients and states are evicted.
    """
    model = Net()
    compiled, optimizer = run.compile(model), torch.optim.AdamW(model.parameters())
    batches = DataLoader(Rows(), batch_size=ROWS, num_workers=workers, multiprocessing_context=how)
    for _ in range(epochs):
        for batch in batches:
            run.step(model, compiled(batch).square().mean(), optimizer)


@scenario
def a_loader_with_forked_workers(run: Run) -> None:
    _loader(run, "fork", 2, 2)


@scenario
def a_loader_with_started_workers(run: Run) -> None:
    _loader(run, "spawn", 1, 1)


# ---- functional calls of a model


@scenario
def a_functional_call_inside(run: Run) -> None:
    model = Net()

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        halved = {name: p * 0.5 for name, p in model.named_parameters()}
        return torch.func.functional_call(model, halved, (x,)).square().mean()

    compiled, optimizer = run.compile(loss_of), sgd(model)
    for _ in range(4):
        run.step(model, compiled(run.batch()), optimizer)


@scenario
def a_gradient_inside(run: Run) -> None:
    """Compile a function with an inner step of gradient descent, and differentiate through this step."""
    model = Net()

    def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    def adapted(x: torch.Tensor) -> torch.Tensor:
        weights: dict[str, torch.Tensor] = dict(model.named_parameters())
        gradients = torch.func.grad(loss_of)(weights, x)
        return loss_of({name: p - 0.1 * gradients[name] for name, p in weights.items()}, x)

    compiled, optimizer = run.compile(adapted), sgd(model)
    for _ in range(4):
        run.step(model, compiled(run.batch(256)), optimizer)


# ---- copies


@scenario
def a_copy_of_the_model(run: Run) -> None:
    """Average the weights of all steps in a copy of the model, and train another copy independently."""
    model = Net()
    compiled, optimizer = run.compile(model), sgd(model)
    average = copy.deepcopy(model)
    for _ in range(4):
        run.step(model, compiled(run.batch()).square().mean(), optimizer)
        with torch.no_grad():
            for mean, new in zip(average.parameters(), model.parameters()):
                mean.lerp_(new, 0.1)
    run.see_model(average)
    other = copy.deepcopy(model)
    run.loop(other, run.compile(other))
    run.see_model(model)


@scenario
def a_pickled_model(run: Run) -> None:
    model = Net()
    run.loop(model, run.compile(model))
    other = pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    run.loop(other, run.compile(other))
    run.see_model(model)
    model.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    run.loop(model, run.compile(model))


@scenario
def weights_that_the_user_writes(run: Run) -> None:
    model = Net()
    compiled, optimizer = run.compile(model), sgd(model)
    for number in range(5):
        run.step(model, compiled(run.batch()).square().mean(), optimizer)
        up = model.blocks[number % BLOCKS].get_parameter("up.weight")
        up.data.mul_(0.9)
        with torch.no_grad():
            model.blocks[number % BLOCKS].get_parameter("down.weight").copy_(up.t())
        loss = compiled(run.batch()).square().mean()
        model.blocks[0].get_parameter("up.bias").data.add_(0.1)
        run.step(model, loss, optimizer)


# ---- parts of a model


@scenario
def blocks_that_share_a_program(run: Run) -> None:
    model = Net()
    for block in model.blocks:
        block.compile(backend="teraio", options=run.options)
    run.loop(model, model)


@scenario
def blocks_that_share_a_program_and_are_checkpointed(run: Run) -> None:
    from torch.utils.checkpoint import checkpoint

    model = Net()
    for block in model.blocks:
        block.compile(backend="teraio", options=run.options)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for number, block in enumerate(model.blocks):
            made = checkpoint(block, x, use_reentrant=number % 2 == 0)
            assert isinstance(made, torch.Tensor)
            x = made
        return x

    run.loop(model, forward)


@scenario
def a_part_of_the_model(run: Run) -> None:
    """Compile all blocks except the first as one function."""
    model = Net()
    rest = run.compile(nn.Sequential(*model.blocks[1:]))

    def forward(x: torch.Tensor) -> torch.Tensor:
        return rest(model.blocks[0](x))

    run.loop(model, forward, (ROWS + 256,) * 4)


@scenario
def a_weight_that_is_returned(run: Run) -> None:
    model = Net()

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = [block.get_parameter("up.weight") for block in model.blocks]
        return model(x), weights[0], weights[1].t()

    compiled, optimizer = run.compile(forward), sgd(model)
    for _ in range(4):
        result, weight, turned = compiled(run.batch())
        run.step(model, result.square().mean() + weight.square().sum() + turned.sum(), optimizer)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(512, WIDTH), nn.Sequential(*[Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 512, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.blocks(self.words(ids))), ids.roll(1))


@scenario
def tied_weights(run: Run) -> None:
    model = Tied()
    compiled, optimizer = run.compile(model), sgd(model)
    for _ in range(4):
        run.step(model, compiled(torch.randint(0, 512, (1024,), generator=run.generator)), optimizer)


# ---- errors


def broken(run: Run, model: nn.Module, compiled: Any, fail: Any) -> None:
    """Train some steps. Before the second and the fourth, `fail` raises an exception."""
    optimizer = sgd(model)
    for number in range(6):
        if number in {1, 3}:
            run.fails(lambda: fail(compiled))
            optimizer.zero_grad()
        run.see_model(model)
        run.step(model, compiled(run.batch()).square().mean(), optimizer)


class Doubt(Exception):
    pass


@scenario
def an_exception_between_two_programs(run: Run) -> None:
    armed: list[int] = []

    def between(x: torch.Tensor, block: nn.Module) -> torch.Tensor:
        torch._dynamo.graph_break()
        if armed:
            raise Doubt(str(armed.pop()))
        return x

    def fail(compiled: Any) -> None:
        armed.append(1)
        compiled(run.batch())

    model = Net(between)
    broken(run, model, run.compile(model), fail)


@scenario
def an_exception_in_a_kernel(run: Run) -> None:
    """Let a kernel in the middle of a program raise an error, because it finds an index out of range."""
    places = torch.zeros(WIDTH, dtype=torch.long)
    model = Net(lambda x, block: x.index_select(1, places))

    def fail(compiled: Any) -> None:
        places[7] = WIDTH
        try:
            compiled(run.batch())
        finally:
            places[7] = 0

    broken(run, model, run.compile(model), fail)


@scenario
def an_exception_in_a_backward(run: Run) -> None:
    model = Net()
    weight = model.blocks[1].get_parameter("up.weight")

    def fail(compiled: Any) -> None:
        def refuse(gradient: torch.Tensor) -> None:
            raise Doubt("no")

        hook = weight.register_hook(refuse)
        try:
            compiled(run.batch()).square().mean().backward()
        finally:
            hook.remove()

    broken(run, model, run.compile(model), fail)


@scenario
def a_loss_that_is_not_finite(run: Run) -> None:
    """Skip the update if the loss is not finite, as a loop with loss scaling does."""
    model = Net()
    compiled, optimizer = run.compile(model), sgd(model)
    for number in range(5):
        loss = compiled(run.batch() * (float("inf") if number == 2 else 1)).square().mean()
        loss.backward()
        if torch.isfinite(loss):
            optimizer.step()
        optimizer.zero_grad()
        run.see(bool(torch.isfinite(loss)))
        run.see_model(model)


@scenario
def a_trace_of_the_model(run: Run) -> None:
    """Trace the model by torch.jit. The traced model reads weights in C++, below all Python classes."""
    model = Net()
    compiled, optimizer = run.compile(model), sgd(model)
    traced: Any = None
    for number in range(5):
        run.step(model, compiled(run.batch()).square().mean(), optimizer)
        if number == 2:
            traced = torch.jit.trace(model, torch.ones(2, WIDTH))
        if traced is not None:
            run.see(traced(torch.ones(2, WIDTH)))
