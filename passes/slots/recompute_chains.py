"""Recompute chains: the kernels of a program that recompute a saved output.

In: a signature and events. Out: slots and nodes by storage.

A chain leads from arguments and other saved outputs to one saved output. The planner uses chains only to
choose the outputs to recompute. After this choice, teraio cuts the joint graph into forward and backward
again (`capture/recompute_cut.py`). This second cut determines the kernels that run, and a later step measures
them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from .events import Alias, Event, Launch, Make, Signature


def find_recompute_chains(
    signature: Signature, events: Sequence[Event], roles: Mapping[str, str]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[str, ...]]]:
    """Return two maps whose keys are the storages that the program can recompute.

    The first map has the slots of the storage's chain, as indices. The second map has the storage's nodes, as
    names in the joint graph.
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
            chains[storage] = tuple(sorted(index + 1 for index in chain))  # slot 0 is `enter`: no kernel
    return chains, {storage: tuple(dict.fromkeys(nodes[storage])) for storage in chains}


def _recompute_chain(
    wanted: str, available: set[str], makers: Mapping[str, Sequence[int]], reads: Sequence[set[str]]
) -> set[int]:
    """Return the kernels that recompute the storage `wanted` from the storages in `available`.

    Return an empty set if several kernels, or no kernel, write a storage of the chain.
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
