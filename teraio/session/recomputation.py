"""What a run makes again instead of saving: decided with the first plan, compiled once more, measured.

    asked     a joint graph is cut (passes/capture/recompute_cut.py): which of its nodes were decided on, by
              this run, by the plan file, or by the plan that an earlier run kept
    decide    a plan says what to make again -> nodes of joint graphs; their code is compiled anew
    at_rest   no compiled program runs: Dynamo forgets the code of these graphs, and compiles it at its next
              call

Nothing else is compiled again, and no guard or weight changes: it is what Dynamo does for another shape.
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
    """`find`: the plan that an earlier run kept for a joint graph."""

    def __init__(self, replay: Plan | None, find: Find, wanted: bool) -> None:
        self.wanted, self.find = wanted, find
        self.sets: dict[str, frozenset[str]] = {}
        self.codes: dict[str, set[CodeType]] = defaultdict(set)
        self.due: set[str] = set()  # graphs whose code is to be compiled anew
        self.looked: set[str] = set()
        if replay is not None:
            self._add_nodes_to_recompute(replay.remade)
        elif wanted and (latest := find(LATEST)) is not None:
            self._add_nodes_to_recompute(latest.remade)

    @property
    def cache_key(self) -> str:
        """All sets, in a stable form: what is compiled with others is another program."""
        rows = [f"{graph} {sorted(nodes)}" for graph, nodes in sorted(self.sets.items()) if nodes]
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]

    def note_loaded_program(self, graph: str) -> None:
        """A program of this graph is there; from a cache it comes without being asked for."""
        code = _code_being_compiled()
        if code is not None:
            self.codes[graph].add(code)
        self.due.discard(graph)

    def nodes_to_recompute(self, graph: str) -> Collection[str]:
        """Called while a joint graph is cut."""
        if self.wanted and graph not in self.sets and graph not in self.looked:
            self.looked.add(graph)
            kept = self.find(graph)
            if kept is not None:
                self._add_nodes_to_recompute(kept.remade)
        return self.sets.get(graph, ())

    def is_recompute_undecided(self, step: Step) -> bool:
        """Whether it is still to be decided what of this step is made again."""
        return self.wanted and not any(graph in self.sets for graph in joint_graphs_of_step(step))

    def recomputed_nodes_of(self, step: Step) -> tuple[RecomputedNode, ...]:
        """For a plan of this step: what its programs were compiled with."""
        return tuple(
            RecomputedNode(graph, node)
            for graph in joint_graphs_of_step(step)
            for node in sorted(self.sets.get(graph, ()))
        )

    def mark_tensors_for_recompute(self, step: Step, names: Collection[str]) -> bool:
        """These tensors of the step are to be made again. A program that runs several times in it makes its
        tensor again in all of its calls or in none: where more bytes of it are than are not. Out: whether
        anything is compiled anew."""
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
                "teraio: %s (%s) are made again in the backward instead of saved: %s compiled once more, "
                "then measured and planned",
                fmt_count(len(names), "activation"),
                fmt_bytes(sum(sizes.get(name, 0) for name in names)),
                fmt_count(len(self.due), "graph"),
            )
        return bool(self.due)

    def reset_code_of_due_graphs(self) -> None:
        """Between two steps, if no compiled program is on the stack."""
        codes = {code for graph in self.due for code in self.codes[graph]}
        if not codes or _is_any_code_on_stack(codes):
            return
        from torch._C._dynamo.eval_frame import reset_code

        self.due.clear()
        for code in codes:
            reset_code(code)

    def _add_nodes_to_recompute(self, remade: Iterable[RecomputedNode]) -> None:
        for each in remade:
            self.sets[each.graph] = self.sets.get(each.graph, frozenset()) | {each.node}


def joint_graphs_of_step(step: Step) -> tuple[str, ...]:
    """The joint graphs of a step's forwards, each once."""
    return tuple(dict.fromkeys(call.schedule.graph for call in step.calls if call.schedule.graph))


def _code_being_compiled() -> CodeType | None:
    """The code that Dynamo compiles now."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        found = InstructionTranslator.current_tx()
    except AttributeError:  # it compiles nothing: the graph came another way
        return None
    code = getattr(found, "f_code", None)
    return code if isinstance(code, CodeType) else None


def describe_compiling_function() -> str:
    """Says which function Dynamo compiles now: `Llama.forward (model.py:61)`."""
    code = _code_being_compiled()
    if code is None or "_dynamo" in Path(code.co_filename).parts:  # Dynamo's own, around a layer of torch's
        return "a model"
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _is_any_code_on_stack(codes: Collection[CodeType]) -> bool:
    """Whether one of them, or what Dynamo made of it, is on the stack."""
    places = {(code.co_filename, code.co_firstlineno) for code in codes}
    frame = sys._getframe()
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_firstlineno) in places:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
