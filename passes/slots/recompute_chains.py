"""Recompute chains: the kernels of a program that recompute a saved output.

In: a signature and events. Out: slots and nodes by storage. A chain is followed from a saved output back to
arguments and other saved outputs. The planner uses chains only to choose the outputs to recompute. The second
cut of the graph (`capture/recompute_cut.py`) determines the kernels that really run, and these kernels are
measured when they run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from .events import Alias, Event, Launch, Make, Signature


def find_recompute_chains(
    signature: Signature, events: Sequence[Event], roles: Mapping[str, str]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[str, ...]]]:
    """Return two maps from each storage that can be recomputed: to its chain's slots, and to its nodes.

    Slots are given by their index, and nodes by their names in the joint graph.
    """
    if not signature.possible:
        return {}, {}
    root: dict[str, str] = {name: name for name, _ in signature.arguments}
    launches: list[Launch] = []
    name: str | None
    for event in events:
        if isinstance(event, Make):
            root[event.name] = event.name
        elif isinstance(event, Alias) and event.old in root:
            root[event.new] = root[event.old]
        elif isinstance(event, Launch):
            launches.append(event)
    makers: dict[str, list[int]] = defaultdict(list)
    for index, launch in enumerate(launches):
        for name in launch.writes & root.keys():
            makers[root[name]].append(index)
    nodes: dict[str, list[str]] = defaultdict(list)
    for position, name in enumerate(signature.outputs[: len(signature.nodes)]):
        if name is not None and name in root and roles.get(root[name]) == "saved":
            nodes[root[name]].append(signature.nodes[position])
    available = {name for name, _ in signature.arguments} | nodes.keys()
    chains: dict[str, tuple[int, ...]] = {}
    for storage, names in nodes.items():
        chain = _recompute_chain(
            storage, available, makers, [{root.get(n, n) for n in x.reads} for x in launches]
        )
        if chain and signature.possible.issuperset(names):
            chains[storage] = tuple(sorted(index + 1 for index in chain))  # the first slot is `enter`
    return chains, {storage: tuple(dict.fromkeys(nodes[storage])) for storage in chains}


def _recompute_chain(
    wanted: str, available: set[str], makers: Mapping[str, Sequence[int]], reads: Sequence[set[str]]
) -> set[int]:
    """Return the kernels of a chain.

    The set is empty if not exactly one kernel writes each storage of the chain.
    """
    chain: set[int] = set()
    open_ = [wanted]
    while open_:
        storage = open_.pop()
        if len(makers.get(storage, ())) != 1:
            return set()
        maker = makers[storage][0]
        if maker not in chain:
            chain.add(maker)
            open_ += [source for source in sorted(reads[maker]) if source not in available]
    return chain
