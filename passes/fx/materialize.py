"""A plan written into an FX graph: the moves of its call are nodes, and the table is not asked.

A slot at which nothing moves stays one node. One at which something does becomes its parts:

    take_in(3, (addmm, primals_4))        what the kernel before made is known from here on
    evict('0.addmm', 'ssd')               the write begins
    fetch('2.weight', 'ssd')              the read begins
    wait('1.weight', 'fetch')             compute waits for a read that began earlier, in whatever call
    ensure(3)                             the law: what the kernel needs is here, and there is room for it

Moves name their tensors as the plan does: many are none of this graph's, as the states that leave during a
forward. Residency stays the law: with a move missing, or two of them in the wrong order, the numbers are the
same. A graph has the moves of one call: a program that runs several times in a step is as many graphs, and
the optimizer's ticks, which have no graph, follow the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.fx.node import map_arg

from teraio.formats.moves_by_kernel import acts_by_tick
from teraio.formats.plan import Plan

SLOT = "teraio_slot"  # as `fx.insert_slots` names it
VERBS = ("evict", "drop", "fetch", "wait")


class MoveRunner(Protocol):
    """Whom the nodes call (runtime/engine/explicit_moves.py)."""

    def slot(self, index: int, tensors: Sequence[Any], live_bytes: int | None = None) -> None: ...
    def take_in(self, index: int, tensors: Sequence[Any], live_bytes: int | None = None) -> None: ...
    def evict(self, tensor: str, tier: str) -> None: ...
    def drop(self, tensor: str, tier: str) -> None: ...
    def fetch(self, tensor: str, tier: str) -> None: ...
    def wait(self, tensor: str, move: str) -> None: ...
    def ensure(self, index: int) -> None: ...


def copy_graph_with_moves(
    graph: torch.fx.GraphModule, plan: Plan, first: int, length: int, runs: MoveRunner | None = None
) -> torch.fx.GraphModule:
    """The graph of a call with its slots (`fx.insert_slots`), whose own is tick `first` of the plan's step of
    `length` ticks, with the moves written in. The graph that is given stays as it is. Without `runs` the new
    one is there to be read."""
    spelled = acts_by_tick(plan, length)
    target = {name: _make_node_target(name, runs) for name in (*VERBS, "slot", "take_in", "ensure")}
    made = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    slots = 0
    for node in graph.graph.nodes:
        if not _is_call_to(node, SLOT):
            copies[node] = made.node_copy(node, copies.__getitem__)
            continue
        index, *rest = map_arg(node.args, copies.__getitem__)
        moves = spelled.get(first + slots, ())
        made.call_function(target["take_in" if moves else "slot"], (index, *rest))
        for act in moves:
            made.call_function(target[act.verb], (act.tensor, act.of))
        if moves:
            made.call_function(target["ensure"], (index,))
        slots += 1
    assert slots and first + slots <= length, f"{slots} slots from tick {first} on, in a step of {length}"
    return torch.fx.GraphModule(graph, made)


def _is_call_to(node: torch.fx.Node, name: str) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == name


def _make_node_target(name: str, runs: MoveRunner | None) -> Callable[..., None]:
    """A function that prints as `teraio.NAME`."""

    def call_runner(*arguments: Any) -> None:
        assert runs is not None, "this graph was made to be read"
        getattr(runs, name)(*arguments)

    call_runner.__module__, call_runner.__name__, call_runner.__qualname__ = "teraio", name, name
    return call_runner
