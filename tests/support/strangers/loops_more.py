"""Training loops from papers and tutorials, with several models, several losses or random choices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from strangers.case import Compile
from strangers.loops_parts import CLASSES, GIVEN, Convolutions, Perceptron, images, random, rows

Loop = Callable[[Compile], Iterable[Any]]


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class Painter(nn.Module):
    """The generator network of DCGAN."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(32, 2 * width, 4, 1, 0, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class Critic(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 1, 4, 1, 0),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x).flatten()
        return out


def dcgan(compile: Compile) -> Iterable[Any]:
    """Train a generator and a critic alternately, as in torch's DCGAN tutorial."""
    painter, critic = compile(Painter()), compile(Critic())
    of_painter = torch.optim.Adam(painter.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    for real, _ in images():
        critic.zero_grad()
        of_real = criterion(critic(real), torch.ones(8))
        of_real.backward()
        fake = painter(torch.randn(8, 32, 1, 1))
        of_fake = criterion(critic(fake.detach()), torch.zeros(8))
        of_fake.backward()
        of_critic.step()
        painter.zero_grad()
        loss = criterion(critic(fake), torch.ones(8))
        loss.backward()
        of_painter.step()
        yield from (of_real.item(), of_fake.item(), loss.item())
    yield from (painter, critic, of_painter, of_critic)


def gradient_penalty(compile: Compile) -> Iterable[Any]:
    """Train WGAN-GP. The second derivative of its gradient penalty goes through the uncompiled layers."""
    painter, critic = compile(Painter()), Critic()
    compile(critic)
    of_painter = torch.optim.Adam(painter.parameters(), lr=1e-4, betas=(0.0, 0.9))
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
    for number, (real, _) in enumerate(images(6)):
        with torch.no_grad():
            fake = painter(torch.randn(8, 32, 1, 1))
        part = torch.rand(8, 1, 1, 1)
        mixed = (part * real + (1 - part) * fake).requires_grad_()
        slopes = torch.autograd.grad(critic.forward(mixed).sum(), mixed, create_graph=True)[0]
        penalty = ((slopes.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        yield step(of_critic, loss)
        if number % 2:
            yield step(of_painter, -critic(painter(torch.randn(8, 32, 1, 1))).mean())
    yield from (painter, critic, of_painter, of_critic)


def distills(compile: Compile) -> Iterable[Any]:
    """Train a student on the outputs of a frozen teacher."""
    teacher, student = compile(Perceptron().eval().requires_grad_(False)), compile(Perceptron(128))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    for x, y in rows():
        with torch.no_grad():
            target = functional.softmax(teacher(x) / 2, dim=-1)
        logits = student(x)
        soft = functional.kl_div(functional.log_softmax(logits / 2, dim=-1), target, reduction="batchmean")
        yield step(optimizer, 0.5 * functional.cross_entropy(logits, y) + 2 * soft)
    yield from (teacher, student, optimizer)


def simclr(compile: Compile) -> Iterable[Any]:
    model = compile(Convolutions(made=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, _ in images():
        both = functional.normalize(model(torch.cat([x, x + 0.1 * torch.randn_like(x)])), dim=1)
        near = (both @ both.T / 0.5).masked_fill(torch.eye(16, dtype=torch.bool), -1e9)
        yield step(optimizer, functional.cross_entropy(near, (torch.arange(16) + 8) % 16))
    yield from (model, optimizer)


class Momentum(nn.Module):
    """The model of MoCo: an encoder, a slowly updated copy of the encoder, and a queue of keys in a
    buffer.
    """

    queue: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Perceptron(made=64)
        self.slow = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", functional.normalize(torch.randn(64, 1024), dim=0))
        self.at = 0

    def forward(self, x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        found = functional.normalize(self.encoder(x), dim=1)
        near = (found * key).sum(1, keepdim=True)
        logits = torch.cat([near, found @ self.queue.clone().detach()], dim=1) / 0.07
        return functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    @torch.no_grad()
    def keys(self, x: torch.Tensor) -> torch.Tensor:
        for slow, fast in zip(self.slow.parameters(), self.encoder.parameters()):
            slow.data = slow.data * 0.99 + fast.data * 0.01
        return functional.normalize(self.slow(x), dim=1)

    @torch.no_grad()
    def put(self, key: torch.Tensor) -> None:
        self.queue[:, self.at : self.at + len(key)] = key.T
        self.at = (self.at + len(key)) % self.queue.shape[1]


def moco(compile: Compile) -> Iterable[Any]:
    """Train MoCo. Each step replaces the slow encoder's weights by `.data =`, and writes to the queue."""
    model: Any = compile(Momentum())
    optimizer = torch.optim.SGD(model.encoder.parameters(), lr=0.03, momentum=0.9)
    for x, _ in rows():
        key = model.keys(x + 0.1)
        yield step(optimizer, model(x, key))
        model.put(key)
    yield from (model, optimizer)


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Perceptron(made=32), Perceptron(given=16, made=GIVEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)
        return (functional.mse_loss(self.decoder(z), x, reduction="none").sum(1) + divergence).mean()


class Flow(nn.Module):
    """The model RealNVP, which consists of affine couplings."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(Perceptron(128, 2, GIVEN // 2, GIVEN) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        volume = torch.zeros(len(x))
        a, b = x.chunk(2, dim=1)
        for net in self.nets:
            scale, shift = net(a).chunk(2, dim=1)
            scale = torch.tanh(scale)
            a, b = b * scale.exp() + shift, a
            volume = volume + scale.sum(1)
        return -(torch.distributions.Normal(0.0, 1.0).log_prob(torch.cat([a, b], 1)).sum(1) + volume).mean()


def likelihood(compile: Compile, kind: type[nn.Module]) -> Iterable[Any]:
    """Train a model whose output is its loss."""
    model = compile(kind())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    yield from [step(optimizer, model(x)) for x, _ in rows()]
    yield from (model, optimizer)


class Experts(nn.Module):
    """A mixture of experts. Each expert gets the rows that the router chooses, so the number of rows depends
    on the values in a tensor.
    """

    def __init__(self, width: int = 128, count: int = 6) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(GIVEN, width), nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if row.numel():
                out.index_add_(0, row, torch.relu(expert(x[row])) * weights[row, place, None])
        made: torch.Tensor = self.last(out)
        return made


def classifies(compile: Compile, make: Callable[[], nn.Module]) -> Iterable[Any]:
    model = compile(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in rows(6):
        yield step(optimizer, functional.cross_entropy(model(x), y))
    yield from (model, optimizer)


def reinforce(compile: Compile) -> Iterable[Any]:
    """Run episodes with one observation per call, and make one update from each whole episode (REINFORCE)."""
    policy = compile(Perceptron(made=2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for episode in range(4):
        state, terms = torch.randn(1, GIVEN, generator=random(episode)), []
        for _ in range(6):
            choice = torch.distributions.Categorical(logits=policy(state))
            action = choice.sample()
            state = state.roll(int(action) + 1, dims=1)
            terms.append(choice.log_prob(action) * float(state[0, 0]))
        yield step(optimizer, -torch.cat(terms).sum())
    yield from (policy, optimizer)


def proximal(compile: Compile) -> Iterable[Any]:
    """Collect data by the old policy without gradients, then learn from the data in small batches (PPO)."""
    policy, value = compile(Perceptron(128, made=4)), compile(Perceptron(128, made=1))
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=3e-4, eps=1e-5)
    for round_number in range(3):
        seen = torch.randn(32, GIVEN, generator=random(round_number))
        with torch.no_grad():
            choice = torch.distributions.Categorical(logits=policy(seen))
            action = choice.sample()
            before, reward = choice.log_prob(action), seen[:, 0] * action
            gain = reward - value(seen)[:, 0]
        for part in torch.randperm(32).split(16):
            choice = torch.distributions.Categorical(logits=policy(seen[part]))
            ratio = (choice.log_prob(action[part]) - before[part]).exp()
            clipped = torch.min(ratio * gain[part], ratio.clamp(0.8, 1.2) * gain[part])
            error = (value(seen[part])[:, 0] - reward[part]) ** 2
            optimizer.zero_grad()
            loss = -clipped.mean() + 0.5 * error.mean() - 0.01 * choice.entropy().mean()
            loss.backward()
            nn.utils.clip_grad_norm_([*policy.parameters(), *value.parameters()], 0.5)
            optimizer.step()
            yield loss.item()
    yield from (policy, value, optimizer)


LOOPS: dict[str, Loop] = {
    "dcgan": dcgan,
    "gradient_penalty": gradient_penalty,
    "distills": distills,
    "simclr": simclr,
    "moco": moco,
    "variational": partial(likelihood, kind=Variational),
    "flow": partial(likelihood, kind=Flow),
    "experts": partial(classifies, make=Experts),
    "reinforce": reinforce,
    "proximal": proximal,
}
