"""The activations that the backward recomputes instead of fetching: chosen with the first plan.

    nodes_to_recompute            the chosen nodes of a joint graph, for passes/capture/recompute_cut.py;
                                  this run, the plan file or an earlier run's plan chose them
    mark_tensors_for_recompute    the planner's tensors -> nodes of joint graphs; these graphs become due
    reset_code_of_due_graphs      between steps: Dynamo forgets the code of due graphs, and compiles the code
                                  again at its next call

Only the code of due graphs is compiled again, in the same way as Dynamo compiles code for another shape.
Guards and weights do not change. The recompiled step is measured and planned like a new step.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import CodeType

from teraio.formats.plan import Plan, RecomputedNode
from teraio.formats.schedule import Step
from teraio.session.plan_reuse import LATEST
from teraio.units import fmt_bytes, fmt_count

log = logging.getLogger("teraio")

Find = Callable[[str], Plan | None]


class Recomputation:
    """The chosen nodes of each joint graph. `find` returns the cached plan of a joint graph."""

    def __init__(self, replay: Plan | None, find: Find, wanted: bool) -> None:
        self.wanted, self.find = wanted, find
        self.sets: dict[str, frozenset[str]] = {}
        self.codes: dict[str, set[CodeType]] = defaultdict(set)
        self.due: set[str] = set()  # graphs whose code must be compiled again
        self.searched: set[str] = set()
        if replay is not None:
            self._add_nodes_to_recompute(replay.remade)
        elif wanted and (latest := find(LATEST)) is not None:
            self._add_nodes_to_recompute(latest.remade)

    @property
    def cache_key(self) -> str:
        """Return a digest of all chosen nodes, because programs compiled with other nodes differ."""
        rows = [f"{graph} {sorted(nodes)}" for graph, nodes in sorted(self.sets.items()) if nodes]
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]

    def note_loaded_program(self, graph: str) -> None:
        """Record the Python code that Dynamo compiles while a program of this graph is loaded.

        The program may come from a cache.
        """
        code = _code_being_compiled()
        if code is not None:
            self.codes[graph].add(code)
        self.due.discard(graph)

    def nodes_to_recompute(self, graph: str) -> Collection[str]:
        """Return the chosen nodes of a joint graph.

        If this run chose none, the nodes come from a cached plan.
        """
        if self.wanted and graph not in self.sets and graph not in self.searched:
            self.searched.add(graph)
            kept = self.find(graph)
            if kept is not None:
                self._add_nodes_to_recompute(kept.remade)
        return self.sets.get(graph, ())

    def is_recompute_undecided(self, step: Step) -> bool:
        """Return True if recomputation is on and none of the joint graphs of this step has a choice."""
        return self.wanted and not any(graph in self.sets for graph in joint_graphs_of_step(step))

    def recomputed_nodes_of(self, step: Step) -> tuple[RecomputedNode, ...]:
        """Return the recomputed nodes in the step's programs, for a plan of this step."""
        return tuple(
            RecomputedNode(graph, node)
            for graph in joint_graphs_of_step(step)
            for node in sorted(self.sets.get(graph, ()))
        )

    def mark_tensors_for_recompute(self, step: Step, names: Collection[str]) -> bool:
        """Choose the nodes that compute these tensors. Return True if any code must be recompiled.

        A program that a step calls several times recomputes a node in all calls or in none. The calls vote,
        and the majority decides. The weight of a call's vote is the number of bytes of the node's tensor in
        this call.
        """
        sizes = {name: size_bytes for name, _, size_bytes, _ in step.kinds}
        votes: dict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
        for call in step.calls:
            for buffer, name in zip(call.schedule.buffers, call.tensors):
                if buffer.again and name in sizes:
                    sign = 1 if name in names else -1
                    votes[call.schedule.graph, buffer.nodes] += sign * max(sizes[name], 1)
        chosen: dict[str, set[str]] = {graph: set() for graph in joint_graphs_of_step(step)}
        for (graph, nodes), bytes_for in votes.items():
            if bytes_for > 0:
                chosen[graph] |= set(nodes)
        self.sets |= {graph: frozenset(nodes) for graph, nodes in chosen.items()}
        self.due |= {graph for graph, nodes in chosen.items() if nodes}
        if self.due:
            log.info(
                "teraio: recomputing %s (%s) in the backward instead of saving: compiling %s once more, then "
                "measuring and planning",
                fmt_count(len(names), "activation"),
                fmt_bytes(sum(sizes.get(name, 0) for name in names)),
                fmt_count(len(self.due), "graph"),
            )
        return bool(self.due)

    def reset_code_of_due_graphs(self) -> None:
        """Have Dynamo forget the code of due graphs, unless the code is on the call stack.

        Call this between steps.
        """
        codes = {code for graph in self.due for code in self.codes[graph]}
        if not codes or _is_any_code_on_stack(codes):
            return
        from torch._C._dynamo.eval_frame import reset_code

        self.due.clear()
        for code in codes:
            reset_code(code)

    def _add_nodes_to_recompute(self, nodes: Iterable[RecomputedNode]) -> None:
        for each in nodes:
            self.sets[each.graph] = self.sets.get(each.graph, frozenset()) | {each.node}


def joint_graphs_of_step(step: Step) -> tuple[str, ...]:
    """Return the joint graphs of a step's forwards, without duplicates."""
    return tuple(dict.fromkeys(call.schedule.graph for call in step.calls if call.schedule.graph))


def _code_being_compiled() -> CodeType | None:
    """Return the code that Dynamo compiles at the moment; None if it compiles nothing."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        found = InstructionTranslator.current_tx()
    except AttributeError:  # Dynamo compiles nothing, so the graph has another source
        return None
    code = getattr(found, "f_code", None)
    return code if isinstance(code, CodeType) else None


def describe_compiling_function() -> str:
    """Return the function that Dynamo compiles at the moment, as `Llama.forward (model.py:61)`."""
    code = _code_being_compiled()
    if code is None or "_dynamo" in Path(code.co_filename).parts:  # Dynamo's wrapper of a torch layer
        return "a model"
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _is_any_code_on_stack(codes: Collection[CodeType]) -> bool:
    """Return True if any of these codes, or Dynamo's rewritten code at the same line, is on the stack."""
    places = {(code.co_filename, code.co_firstlineno) for code in codes}
    frame = sys._getframe()
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_firstlineno) in places:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
