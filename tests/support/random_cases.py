"""Steps, machines and budgets that a planner does not expect. Some are random, and some are made to mislead.

random      any profile that the file reader accepts, on any machine
training    forward, backward and optimizer of a chain, or of a few decoder blocks
still       kernels without duration, which hide no transfer; all ticks begin together
crumbs      one tensor of nearly all memory, and many tiny ones
peaks       many short-lived tensors that each fill the budget, beside long-lived tensors
late        a latency longer than the kernels, so that even a small transfer is expensive
equals      tensors of one size and one lifetime, none of which is a better choice
cramped     slow and almost full tiers, for which a plan may not exist
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random

import toys

from teraio.formats.machine import Link, Machine, Tier
from teraio.formats.profile import Profile, Tensor
from teraio.passes.planner.problem.problem import build_problem

ROOM = 10**12
FAMILIES = ("random", "training", "still", "crumbs", "peaks", "late", "equals", "cramped")
# Positions of the budget between the smallest budget (0) and the budget in which all tensors fit (1)
PARTS = (0.0, 0.1, 0.3, 0.6)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    profile: Profile
    machine: Machine
    budget_bytes: int


def cases(seeds: Iterable[int]) -> Iterator[Case]:
    """Yield at most one case per seed, with alternating families. Cases in which all tensors fit are left
    out.
    """
    for seed in seeds:
        family, random = FAMILIES[seed % len(FAMILIES)], Random(seed)
        profile = _profile(family, random)
        problem = build_problem(profile)
        floor, live = int(problem.floor.max()), int(problem.live.max())
        machine = _machine(family, random, live - floor)
        budget = floor + int(random.choice(PARTS) * (live - floor))
        if floor < live and budget < live:
            yield Case(f"{family}-{seed}", profile, machine, budget)


def _machine(family: str, random: Random, beyond_bytes: int) -> Machine:
    """Return a machine with a drive. The machine often has a host tier, and often one bus for all links.
    Rates are very low to very high.
    """
    rate = random.choice((1, 3, 10, 40)) * toys.BYTE_PER_US
    if family == "training":
        rate *= random.choice((1, 1000))
    latency_ns = 30 * toys.US if family == "late" else random.choice((0, 0, 700))
    ssd, host = ROOM, random.choice((0, beyond_bytes // 3, ROOM))
    if family == "cramped":
        ssd, host = (random.randint(0, beyond_bytes) for _ in range(2))
    bus = random.choice((None, "bus"))
    tiers = [Tier("device", ROOM), Tier("ssd", ssd)]
    links = [
        Link("device", "ssd", rate, latency_ns, bus),
        Link("ssd", "device", 5 * rate // 4, latency_ns, bus),
    ]
    if host:
        tiers.append(Tier("host", host))
        links += [Link("device", "host", 3 * rate, 0, bus), Link("host", "device", 3 * rate, 0, bus)]
    return Machine("drawn", tuple(tiers), tuple(links), (("bus", 3 * rate),) if bus else ())


def _profile(family: str, random: Random) -> Profile:
    made = {"training": _training, "crumbs": _crumbs, "peaks": _peaks, "equals": _equals}
    if family in made:
        return made[family](random)
    kernels, tensors = random.choice((12, 40, 90)), random.choice((8, 30, 60))
    profile = toys.random_profile(random.randrange(10**6), kernels, tensors)
    if family == "still":
        return replace(profile, kernels=tuple(replace(each, duration_ns=0) for each in profile.kernels))
    return profile


def _training(random: Random) -> Profile:
    if random.random() < 0.3:
        return toys.llama_like(random.randint(1, 3))
    return toys.training_profile(random.randint(2, 24), random.choice((7, 100, 1000)))


def _crumbs(random: Random) -> Profile:
    ticks = random.randint(20, 60)
    large = [toys.weight("large", 10_000, (ticks // 3, 2 * ticks // 3), (ticks - 1,))]
    return toys.profile([*large, *_some(random, ticks, random.randint(20, 60), (1, 30))], ticks)


def _peaks(random: Random) -> Profile:
    apart, count = random.randint(4, 8), random.randint(3, 8)
    ticks = apart * (count + 1)
    tall = [toys.activation(f"peak{i}", 400, apart * (i + 1), (apart * (i + 1) + 1,)) for i in range(count)]
    return toys.profile([*tall, *_some(random, ticks, random.randint(6, 20), (20, 100))], ticks)


def _equals(random: Random) -> Profile:
    ticks, count = random.randint(10, 50), random.randint(4, 20)
    uses = tuple(sorted(random.sample(range(ticks), 3)))
    return toys.profile([toys.weight(f"w{i}", 64, uses[:2], uses[2:]) for i in range(count)], ticks)


def _some(random: Random, ticks: int, count: int, sizes: tuple[int, int]) -> list[Tensor]:
    """Return weights and activations with two to four uses."""
    found = []
    for index in range(count):
        uses = sorted(random.sample(range(ticks), random.randint(2, 4)))
        size = random.randint(*sizes)
        if random.random() < 0.5:
            written = tuple(uses[-1:]) if random.random() < 0.7 else ()
            found.append(toys.weight(f"w{index}", size, tuple(uses[: len(uses) - len(written)]), written))
        else:
            found.append(toys.activation(f"a{index}", size, uses[0], tuple(uses[1:])))
    return found
