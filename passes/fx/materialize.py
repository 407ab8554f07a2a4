"""A plan written into an FX graph: the moves of one call become nodes, so the engine reads no table.

A move is an eviction, a fetch or a drop of a tensor. A slot is a node before a kernel that calls the engine.
A slot without moves remains one node. A slot with moves becomes several nodes, for example:

    take_in(3, (addmm, primals_4))        registers the tensors that the previous kernel made
    evict('0.addmm', 'ssd')               begins a write
    fetch('2.weight', 'ssd')              begins a read
    wait('1.weight', 'fetch')             waits for a read that began earlier, in this call or in another call
    ensure(3)                             makes room and makes the tensors of the kernel resident

The nodes contain the tensors' names in the plan. Many of these tensors are not in the graph, for example
optimizer states that are evicted during a forward.

`ensure` makes the kernel's tensors resident even if a move is missing, or if two moves are in the wrong
order. So the moves never change the computed numbers.

A graph has the moves of one call. If a program runs several times in a step, each of these calls gets its own
graph. The optimizer's step has no graph, so its moves remain in the engine's table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.fx.node import map_arg

from teraio.formats.moves_by_kernel import acts_by_tick
from teraio.formats.plan import Plan

SLOT = "teraio_slot"  # name of the function that a slot node calls, in graphs of `fx.insert_slots`
VERBS = ("evict", "drop", "fetch", "wait")


class MoveRunner(Protocol):
    """The functions of the engine that the nodes call (runtime/engine/explicit_moves.py)."""

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
    """Copy a graph that has slots (`fx.insert_slots`), and add the moves of one call to the copy.

    The plan's step has `length` ticks (one for each kernel), and the graph's first slot is tick `first`. The
    given graph is not changed. If `runs` is None, the copy can only be printed.
    """
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
    """Return a function that calls the method `name` of `runs`. In printed graphs it appears as
    `teraio.NAME`.
    """

    def call_runner(*arguments: Any) -> None:
        assert runs is not None, "this graph was made to be printed, without a MoveRunner"
        getattr(runs, name)(*arguments)

    call_runner.__module__, call_runner.__name__, call_runner.__qualname__ = "teraio", name, name
    return call_runner
