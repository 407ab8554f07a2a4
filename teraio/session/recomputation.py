"""The activations that the backward recomputes instead of fetching. They are chosen before the first plan is
made.

    nodes_to_recompute            the chosen nodes of a joint graph, for passes/capture/recompute_cut.py;
                                  this run, the plan file or an earlier run's plan chose them
    mark_tensors_for_recompute    the planner's tensors -> nodes of joint graphs; these graphs become due
    reset_code_of_due_graphs      between steps: Dynamo forgets the code of due graphs, and compiles the code
                                  again at its next call

A joint graph is a forward and its backward together. A graph is due if it must be compiled again because of
its chosen nodes. Dynamo compiles only the code of due graphs again, as it does for inputs of another shape.
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
    """The nodes that each joint graph (forward and backward together) recomputes in its backward.

    The plan cache may have a plan of an earlier run that recomputes nodes of a joint graph. `find` returns
    this plan, or None.
    """

    def __init__(self, replay: Plan | None, find: Find, wanted: bool) -> None:
        self.wanted, self.find = wanted, find
        self.sets: dict[str, frozenset[str]] = {}
        self.codes: dict[str, set[CodeType]] = defaultdict(set)
        self.due: set[str] = set()  # graphs whose chosen nodes require a recompilation
        self.searched: set[str] = set()
        if replay is not None:
            self._add_nodes_to_recompute(replay.remade)
        elif wanted and (latest := find(LATEST)) is not None:
            self._add_nodes_to_recompute(latest.remade)

    def turn_off(self) -> None:
        """Choose no more nodes. The nodes of the plan file and of earlier plans are still recomputed."""
        self.wanted = False

    @property
    def cache_key(self) -> str:
        """Return a hash of all chosen nodes. Compiler caches need it, because other nodes give other
        programs.
        """
        rows = [f"{graph} {sorted(nodes)}" for graph, nodes in sorted(self.sets.items()) if nodes]
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]

    def note_loaded_program(self, graph: str) -> None:
        """Record which Python code Dynamo is compiling, because this code uses a program of `graph`.

        The program itself may be new or come from a cache.
        """
        code = _code_being_compiled()
        if code is not None:
            self.codes[graph].add(code)
        self.due.discard(graph)

    def nodes_to_recompute(self, graph: str) -> Collection[str]:
        """Return the chosen nodes of a joint graph.

        If this run has made no choice for the graph, take the nodes from a cached plan.
        """
        if self.wanted and graph not in self.sets and graph not in self.searched:
            self.searched.add(graph)
            kept = self.find(graph)
            if kept is not None:
                self._add_nodes_to_recompute(kept.remade)
        return self.sets.get(graph, ())

    def is_recompute_undecided(self, step: Step) -> bool:
        """Return True if recomputation is on, and no nodes have been chosen for any joint graph of this
        step.
        """
        return self.wanted and not any(graph in self.sets for graph in joint_graphs_of_step(step))

    def recomputed_nodes_of(self, step: Step) -> tuple[RecomputedNode, ...]:
        """Return the nodes that the step's programs recompute, to store them in a plan for this step."""
        return tuple(
            RecomputedNode(graph, node)
            for graph in joint_graphs_of_step(step)
            for node in sorted(self.sets.get(graph, ()))
        )

    def mark_tensors_for_recompute(self, step: Step, names: Collection[str]) -> bool:
        """Choose the graph nodes that compute these tensors. Return True if any code must be recompiled.

        A step may call one program several times, and the planner may choose a node's tensor in some of the
        calls only. But the program recomputes the node in all calls or in none. So the larger number of bytes
        decides: the bytes of the chosen tensors, or of the others.
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
        """Have Dynamo forget the code of due graphs. If any of this code is on the call stack, do nothing.

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
    """Return the joint graphs (forward and backward together) of a step's programs, each once."""
    return tuple(dict.fromkeys(call.schedule.graph for call in step.calls if call.schedule.graph))


def _code_being_compiled() -> CodeType | None:
    """Return the Python code that Dynamo is compiling now, or None."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        found = InstructionTranslator.current_tx()
    except AttributeError:  # Dynamo is compiling nothing
        return None
    code = getattr(found, "f_code", None)
    return code if isinstance(code, CodeType) else None


def describe_compiling_function() -> str:
    """Return the function that Dynamo is compiling now, as `Llama.forward (model.py:61)`."""
    code = _code_being_compiled()
    # Dynamo itself contains this code: a wrapper of a torch layer.
    if code is None or "_dynamo" in Path(code.co_filename).parts:
        return "a model"
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _is_any_code_on_stack(codes: Collection[CodeType]) -> bool:
    """Return True if any of these codes is on the call stack.

    Dynamo's rewritten version of a code counts, too. It has the same file and line.
    """
    places = {(code.co_filename, code.co_firstlineno) for code in codes}
    frame = sys._getframe()
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_firstlineno) in places:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
