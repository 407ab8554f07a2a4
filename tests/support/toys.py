"""Toy machines and profiles. They are small enough to be checked by hand, or generated from a seed.

The toy machine has a device of 8 bytes and links that carry 1 byte per microsecond. A kernel takes 1
microsecond.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from teraio.formats.machine import Link, Machine, Tier
from teraio.formats.profile import Kernel, Kind, Profile, Tensor

US = 1_000  # nanoseconds
BYTE_PER_US = 1_000_000  # the rate of 1 byte per microsecond, in bytes per second


def machine(
    device: int = 8, ssd: int = 1_000, rate: int = BYTE_PER_US, latency_ns: int = 0, host: int = 0
) -> Machine:
    """Return a machine with a device and an SSD. If `host` is not 0, the machine also has a host tier, whose
    links are twice as fast.
    """
    tiers = [Tier("device", device), Tier("ssd", ssd)]
    links = [Link("device", "ssd", rate, latency_ns), Link("ssd", "device", rate, latency_ns)]
    if host:
        tiers.append(Tier("host", host))
        links += [Link("device", "host", 2 * rate), Link("host", "device", 2 * rate)]
    return Machine("toy", tuple(tiers), tuple(links))


def profile(tensors: list[Tensor], kernels: int, workspace: dict[int, int] | None = None) -> Profile:
    """Return a profile of kernels k0, k1, ... that take 1 microsecond each."""
    rows = tuple(Kernel(f"k{i}", 0, US, (workspace or {}).get(i, 0)) for i in range(kernels))
    return Profile("toy", 0, rows, tuple(tensors))


def weight(name: str, size: int, reads: tuple[int, ...], writes: tuple[int, ...] = ()) -> Tensor:
    return Tensor(name, "weight", size, True, reads, writes)


def activation(name: str, size: int, made: int, reads: tuple[int, ...]) -> Tensor:
    return Tensor(name, "activation", size, False, reads, (made,))


def diamond() -> Profile:
    """Return a profile of two tensors. `a` (4 bytes) is written at tick 0, idle in ticks 1 to 8, and read at
    tick 9. `b` (6 bytes) lives in ticks 4 and 5.

        tick   0   1   2   3   4   5   6   7   8   9
        a 4    W                                   R
        b 6                    W   R
    """
    return profile([activation("a", 4, 0, (9,)), activation("b", 6, 4, (5,))], 10)


def random_profile(seed: int, most_kernels: int = 24, most_tensors: int = 14) -> Profile:
    """Return a random profile that the file reader accepts. Its tensors are of all kinds: short-lived,
    persistent, unused or read-only. Some live around the end of the step. Some kernels have workspaces.
    """
    random, births = Random(seed), Random(seed + 1)
    ticks = random.randint(1, most_kernels)
    kernels = tuple(
        Kernel(f"k{i}", i // 8, random.choice((0, 1, 5, 20)) * US, random.choice((0, 0, 0, 3)))
        for i in range(ticks)
    )
    tensors = []
    for index in range(random.randint(0, most_tensors)):
        kind: Kind = random.choice(("weight", "grad", "state", "activation", "input"))
        persistent = kind in ("weight", "state") or (kind == "grad" and random.random() < 0.5)
        uses = sorted(random.sample(range(ticks), min(ticks, random.choice((0, 1, 2, 2, 3, 5)))))
        if not persistent and not uses:
            uses = [random.randrange(ticks)]
        writes = {tick for tick in uses if random.random() < 0.3}
        if not persistent and kind != "input":
            writes.add(uses[0])
        reads = tuple(t for t in uses if t not in writes or (random.random() < 0.5 and t != uses[0]))
        born = None
        if not persistent and kind != "input" and len(uses) > 1 and births.random() < 0.5:
            born = births.choice(uses[1:])
            writes.add(born)
        tensors.append(
            Tensor(
                f"{kind}{index}",
                kind,
                random.choice((0, 1, 2, 4, 8, 30)),
                persistent,
                reads,
                tuple(sorted(writes)),
                born=born,
            )
        )
    return Profile(f"random-{seed}", 0, kernels, tuple(tensors))


def training_profile(layers: int = 8, size: int = 100) -> Profile:
    """Return a profile of a chain's forward, backward and optimizer, with weights, saved activations,
    gradients and states.

    With L layers, layer i runs forward at tick i and backward at tick 2L-1-i. The optimizer updates the
    weight of layer i at tick 2L+i.
    """
    total = 3 * layers
    tensors = []
    for i in range(layers):
        forward, backward, step = i, 2 * layers - 1 - i, 2 * layers + i
        tensors.append(weight(f"w{i}", size, (forward, backward), (step,)))
        tensors.append(Tensor(f"m{i}", "state", 2 * size, True, (step,), (step,)))
        tensors.append(Tensor(f"g{i}", "grad", size, False, (step,), (backward,)))
        tensors.append(
            activation(f"a{i}", size, forward, tuple(sorted({min(forward + 1, layers), backward})))
        )
    return Profile("training", 0, tuple(Kernel(f"k{i}", 0, 200 * US) for i in range(total)), tuple(tensors))


def in_three_calls(profile: Profile) -> Profile:
    """Return a training whose forward, backward and updates are three calls of equally many kernels."""
    count = len(profile.kernels) // 3
    return replace(
        profile, kernels=tuple(replace(k, call=tick // count) for tick, k in enumerate(profile.kernels))
    )


def random_training(seed: int) -> Profile:
    """Return a training with random additions: constants and counters, gradients that are persistent, weights
    with more uses. Updates are in a random order.
    """
    random, layers = Random(seed), 1 + seed % 5
    profile = training_profile(layers)
    ticks = 3 * layers
    order = [*range(2 * layers), *random.sample(range(2 * layers, ticks), layers)]
    tensors = []
    for tensor in profile.tensors:
        reads, writes = {order[tick] for tick in tensor.reads}, {order[tick] for tick in tensor.writes}
        if random.random() < 0.25 and tensor.kind in ("weight", "state", "grad"):
            (reads if random.random() < 0.6 else writes).add(random.randrange(ticks))
        persistent = tensor.persistent or random.random() < 0.2 or min(reads) < min(writes)
        uses = tuple(sorted(reads)), tuple(sorted(writes))
        tensors.append(Tensor(tensor.name, tensor.kind, tensor.size_bytes, persistent, *uses))
    for index in range(random.randrange(4)):
        uses = tuple(sorted(random.sample(range(ticks), 2))), tuple(random.sample(range(ticks), seed % 2))
        tensors.append(Tensor(f"more{index}", "state", 10, True, *uses))
    return replace(profile, tensors=tuple(tensors))


def llama_like(blocks: int = 32, per_block: int = 15) -> Profile:
    """Return a profile of about 1,000 kernels and 1,900 tensors in the order of a decoder, to measure
    planning time.
    """
    random, tensors, half = Random(0), [], blocks * per_block
    for block in range(blocks):
        for k in range(per_block):
            forward = block * per_block + k
            backward = 2 * half - 1 - forward
            tensors.append(
                activation(
                    f"a{block}.{k}",
                    random.choice((8, 16, 32)) << 20,
                    forward,
                    tuple({min(forward + 1, 2 * half - 1), backward} - {forward}),
                )
            )
            if k % 2:
                step = 2 * half + block
                size = random.choice((16, 64, 128)) << 20
                tensors.append(weight(f"w{block}.{k}", size, tuple(sorted({forward, backward})), (step,)))
                tensors.append(Tensor(f"m{block}.{k}", "state", 2 * size, True, (step,), (step,)))
                tensors.append(Tensor(f"v{block}.{k}", "state", 2 * size, True, (step,), (step,)))
                tensors.append(Tensor(f"g{block}.{k}", "grad", size, False, (step,), (backward,)))
    kernels = tuple(Kernel(f"k{i}", 0, 1_000_000) for i in range(2 * half + blocks))
    return Profile("llama-like", 0, kernels, tuple(tensors))
