"""Generated profiles, machines, plans and timelines. Every value in them is valid in a file."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from teraio.formats.machine import Link, Machine, Tier
from teraio.formats.plan import Evict, Fetch, Home, Plan, Predicted
from teraio.formats.profile import Kernel, Profile, Tensor
from teraio.formats.timeline import Counter, Span, Stall, Timeline
from teraio.units import LIMIT

Data = Profile | Machine | Plan | Timeline

numbers = st.one_of(st.integers(0, 9), st.integers(0, LIMIT - 1))
small = st.integers(0, 2**40)
letters = st.characters(exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp"))
names = st.text(letters, min_size=1, max_size=20)
texts = st.text(letters, max_size=20)
tiers = st.sampled_from(["host", "ssd", "ssd0", "ssd1"])
plan_ticks = st.integers(0, 2**33 - 1)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    kernels = draw(
        st.lists(
            st.builds(Kernel, names, st.integers(0, 99), small, small, st.none() | small, st.none() | small)
        )
    )
    ticks = st.lists(st.integers(0, len(kernels) - 1), unique=True) if kernels else st.just([])

    def tensor(name: str) -> Tensor:
        reads, writes, again = (tuple(sorted(draw(ticks))) for _ in range(3))
        kind: Any = draw(st.sampled_from(["weight", "grad", "state", "activation", "input"]))
        born_at_write = bool(writes) and (not reads or writes[0] <= reads[0])
        persistent = draw(st.booleans()) or not (born_at_write or kind == "input")
        births = [] if persistent or kind == "input" else [t for t in writes if t > min((*reads, *writes))]
        born = draw(st.none() | st.sampled_from(births)) if births else None
        return Tensor(name, kind, draw(small), persistent, reads, writes, again, born)

    tensors = [tensor(name) for name in draw(st.lists(names, unique=True, max_size=8))]
    return Profile(draw(texts), draw(numbers), tuple(kernels), tuple(tensors))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    tier_names = sorted({"device", *draw(st.lists(tiers | names))})
    shared = sorted(draw(st.dictionaries(names, st.integers(1, LIMIT - 1), max_size=3)).items())
    ends = [(a, b) for a in tier_names for b in tier_names if a != b]
    shares = st.none() | st.sampled_from([name for name, _ in shared]) if shared else st.none()
    links = [
        Link(a, b, draw(st.integers(1, LIMIT - 1)), draw(numbers), draw(shares))
        for a, b in (draw(st.lists(st.sampled_from(ends), unique=True, max_size=6)) if ends else [])
    ]
    return Machine(
        draw(texts), tuple(Tier(name, draw(numbers)) for name in tier_names), tuple(links), tuple(shared)
    )


@st.composite
def moves(draw: st.DrawFn) -> Evict | Fetch:
    tensor, tier = draw(names), draw(tiers)
    first, last = sorted((draw(plan_ticks), draw(plan_ticks)))
    match draw(st.integers(0, 2)):
        case 0:
            return Evict(tensor, tier, last)
        case 1:
            return Evict(tensor, tier, last, first)
        case _:
            return Fetch(tensor, tier, first, last)


plans = st.builds(
    Plan,
    texts,
    texts,
    numbers,
    st.lists(st.builds(Home, names, tiers), unique_by=lambda home: home.tensor, max_size=5).map(tuple),
    st.lists(moves(), max_size=8).map(tuple),
    st.lists(names, unique=True, max_size=5).map(tuple),
    st.builds(Predicted, numbers, numbers, numbers),
    late=st.lists(names, unique=True, max_size=5).map(tuple),
    backward=st.lists(names, unique=True, max_size=5).map(tuple),
)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start, end = sorted((draw(numbers), draw(numbers)))
    return Span(draw(names), draw(texts), start, end, draw(numbers), draw(texts))


timelines = st.builds(
    Timeline,
    st.sampled_from(["measured", "predicted"]),
    st.lists(spans(), max_size=5).map(tuple),
    st.lists(st.builds(Counter, tiers, names, numbers, numbers), max_size=5).map(tuple),
    st.lists(st.builds(Stall, plan_ticks, texts, numbers, names), max_size=5).map(tuple),
    numbers,
    numbers,
)

everything: st.SearchStrategy[Data] = st.one_of(profiles(), machines(), plans, timelines)
