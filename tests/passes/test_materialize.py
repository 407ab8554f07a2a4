"""Tests of graphs that contain the moves of a plan.

Usually the engine looks up the moves in a table. With the moves in the graph, the moves, their order and the
numbers must be the same. `teraio explain --graph` prints the moves that the graphs contain.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import steady
import torch
import toys
import tree
from materialize_train import (
    FAILING,
    HOSTILE_GRAPH,
    HOSTILE_TABLE,
    PLANTED,
    UNLAWFUL,
    WAYS,
    WIDTH,
    Model,
    Training,
    too_late,
    train,
    turned_round,
    without,
)
from torch.fx import GraphModule

from teraio.cli import main
from teraio.cli.commands import step_listing as listing
from teraio.formats.moves_by_kernel import acts_by_tick
from teraio.formats.plan import Evict, Fetch, Plan
from teraio.passes.fx import materialize
from teraio.passes.fx import program as fx
from teraio.runtime.step.plan_table import EVICT, FETCH, FREE, table_of
from teraio.runtime.step.program import Program


@pytest.fixture(scope="module")
def plain() -> Training:
    return train()


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    # With the option `profile`, a run follows its first plan to the end.
    folder = tmp_path_factory.mktemp("run")
    with steady.planned():
        return train(profile=str(folder / "run.profile.json"), timeline=str(folder / "run.timeline.json"))


# ---- running graphs with moves


def test_graph_moves_equal_table_moves_in_order(training: Training) -> None:
    table, graph = training.of("table"), training.of("graph")
    assert graph == table
    assert len(table) > 80, "too few moves for this test to show anything"
    assert {what for _, what, _ in table} >= {"begin_evict", "end_evict", "begin_fetch", "end_fetch"}
    skipped = [after - before for before, after in pairwise(training.skipped)]
    assert skipped[training.last("graph") - 1] == skipped[training.last("table") - 1]


def test_numbers_are_bit_equal_for_any_moves_in_the_graph(training: Training, plain: Training) -> None:
    assert training.losses == plain.losses
    assert training.digest == plain.digest
    assert len(set(plain.losses)) == len(WAYS)


@pytest.mark.parametrize("bug", PLANTED)
def test_these_tests_find_a_planted_bug(training: Training, bug: str) -> None:
    """Check that the step with the bug makes other moves. The step before it, and the second step after it,
    must make the right moves."""
    at = training.last(bug)
    before, planted, _, after = training.events[at - 1 : at + 3]
    assert before == after == training.of("table") != planted


def test_hostile_plan_makes_same_moves_from_graph_and_table(training: Training) -> None:
    """Follow a plan with impossible moves and with moves that do not fit.

    A step reads its moves either from nodes of the graph or from a table of the plan. Both steps must skip
    the same moves.
    """
    table, graph = training.of(HOSTILE_TABLE), training.of(HOSTILE_GRAPH)
    assert [event for event in graph if event[1] != "end_fetch"] == [e for e in table if e[1] != "end_fetch"]
    assert len(table) > 100 and any(what == "miss" for _, what, _ in table)
    skipped = [after - before for before, after in pairwise(training.skipped)]
    assert skipped[training.last(HOSTILE_GRAPH) - 1] == skipped[training.last(HOSTILE_TABLE) - 1] > 20


def test_tensor_of_a_kernel_is_kept_despite_graph_moves(training: Training) -> None:
    at, usual = training.last(UNLAWFUL), training.last("graph")
    assert training.events[at] == training.of("table")
    skipped = [after - before for before, after in pairwise(training.skipped)]
    assert skipped[at - 1] == skipped[usual - 1] + 1


def test_failed_read_is_retried_at_the_kernel_that_needs_it(training: Training) -> None:
    """Check that a kernel waits for its tensor at the `wait` in the graph, and not at the slot after `wait`.
    Check also that a failed read counts only as a miss."""
    more = [event for event in training.of(FAILING) if event not in training.of("table")]
    assert [what for _, what, _ in more] == ["miss"]
    slot, _, name = more[0]
    assert training.of(FAILING).count((slot, "end_fetch", name)) == 2


def test_timeline_has_the_kernels_of_a_step_with_graph_moves(training: Training) -> None:
    assert len(training.kernels[0]) > 60
    assert training.kernels[training.last("graph")] == training.kernels[training.last("table")]


# ---- listings of moves


def lines_of(graph: GraphModule, program: Program) -> Iterator[str]:
    """Yield the moves and the kernel names that the code of a graph contains, in order."""
    arrow = {"evict": "evict {} -> {}", "fetch": "fetch {} <- {}", "drop": "drop {}", "wait": "wait {} ({})"}
    for line in graph.code.splitlines():
        if move := re.search(r"teraio_(evict|drop|fetch|wait)\('(.+)', '(\w+)'\)", line):
            yield arrow[move[1]].format(move[2], move[3])
        elif slot := re.search(r"teraio_(?:slot|ensure)\((\d+)[,)]", line):
            yield program.schedule.slots[int(slot[1])].kernel


def printed(text: str) -> dict[int, list[str]]:
    """Return the lines of a listing by call. Leave out the ticks, and the tensors that kernels use."""
    found: dict[int, list[str]] = {}
    for line in text.splitlines():
        if call := re.match(r"call (\d+),", line):
            found[int(call[1])] = []
        elif found:
            found[max(found)].append(re.sub(r"^ *(\d+  )?|  \[.*\]$", "", line))
    return found


def test_explain_prints_the_moves_of_the_graphs(training: Training) -> None:
    assert training.plan is not None and training.profile is not None
    found = printed(listing.step_listing_as_text(training.plan, training.profile))
    graphs = [[*lines_of(gm, program)] for gm, (_, program) in zip(training.written, training.graphs)]
    assert len(graphs) == 2 and all(len(lines) > 30 for lines in graphs)
    assert [found[0], found[1]] == graphs
    for bug in (without("evict"), too_late, turned_round):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(listing, "acts_by_tick", lambda *given: bug(acts_by_tick(*given)))  # noqa: B023  called immediately
            assert printed(listing.step_listing_as_text(training.plan, training.profile))[0] != graphs[0]


def test_explain_marks_the_call_without_a_graph(training: Training) -> None:
    assert training.plan is not None and training.profile is not None
    parts = [*listing.list_calls(training.plan, training.profile)]
    assert [part.optimizer for part in parts] == [False, False, True]
    heads = [
        line
        for line in listing.step_listing_as_text(training.plan, training.profile).splitlines()
        if line[:4] == "call"
    ]
    assert ["without a graph" in line for line in heads] == [False, False, True]
    shown = [act for part in parts for line in part.lines for act in line.before]
    assert shown == [
        act for acts in acts_by_tick(training.plan, len(training.profile.kernels)).values() for act in acts
    ]


def test_explain_prints_a_listing_and_the_same_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """List the moves of the step `diamond` in toys.py. It makes `a` at tick 0, evicts `a` while `b` is alive,
    and uses `a` at tick 9."""
    toys.diamond().write(tmp_path / "profile.json")
    toys.machine().write(tmp_path / "machine.json")
    moves = (Evict("a", "ssd", 4, 1), Fetch("a", "ssd", 6, 9))
    Plan("", "hand", 8, (), moves).write(tmp_path / "plan.json")
    files = [str(tmp_path / "plan.json"), str(tmp_path / "profile.json")]
    command = ["explain", *files, "--machine", str(tmp_path / "machine.json"), "--graph"]
    assert main.main(command) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "call 0, ticks 0 to 9, 4 lines of the plan",
        "   0  k0  [writes a]",
        "        evict a -> ssd",
        "   1  k1",
        "   2  k2",
        "   3  k3",
        "        wait a (evict)",
        "   4  k4  [writes b]",
        "   5  k5  [reads b]",
        "        fetch a <- ssd",
        "   6  k6",
        "   7  k7",
        "   8  k8",
        "        wait a (fetch)",
        "   9  k9  [reads a]",
    ]
    assert main.main([*command, "--json"]) == 0
    (call,) = json.loads(capsys.readouterr().out)["calls"]
    assert [line["tick"] for line in call["lines"] if line["before"]] == [1, 4, 6, 9]
    assert call["lines"][9]["before"] == [{"verb": "wait", "tensor": "a", "of": "fetch"}]
    assert (call["lines"][4]["kernel"], call["lines"][4]["writes"]) == ("k4", ["b"])


def test_closed_pipe_ends_a_listing_without_traceback(tmp_path: Path) -> None:
    root = tree.ROOT / "profiles"
    profile = str(root / "llama-cpu-160MiB.profile.json.gz")
    machine = str(root / "machines/h100-4ssd-nohost.machine.json")
    Plan("", "hand", 2**40).write(tmp_path / "plan.json")
    command = [sys.executable, "-m", "teraio", "explain", str(tmp_path / "plan.json"), profile]
    with subprocess.Popen(
        [*command, "--machine", machine, "--graph"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as ran:
        assert ran.stdout is not None and ran.stderr is not None
        ran.stdout.close()
        assert ran.stderr.read() == b""
    assert ran.returncode == 141


# ---- operations of a plan in the graph (acts)


def any_plan(seed: int, ticks: int) -> Plan:
    draw = random.Random(seed)
    moves: list[Evict | Fetch] = []
    for number in range(draw.randrange(1, 40)):
        first, second = sorted(draw.randrange(2 * ticks) for _ in range(2))
        first = draw.choice((first, second))
        evict = Evict(f"t{number}", "ssd", second, draw.choice((first, None)))
        moves.append(draw.choice((evict, Fetch(f"t{number}", "host", first, second))))
    return Plan("", "any", 0, (), tuple(moves))


def test_acts_equal_table_operations_plus_waits_for_reads() -> None:
    """Compare the moves in the graph (acts) with the operations in the table.

    The plans are random, and their moves may cross the end of the step. If an eviction begins and ends before
    the same kernel, the table has only one operation for it.
    """
    operation = {
        "evict": EVICT,
        "fetch": FETCH,
        "drop": FREE,
        "wait": FREE,
    }
    together = 0
    for seed in range(300):
        ticks = 1 + seed % 23
        plan = any_plan(seed, ticks)
        found: dict[int, list[tuple[int, str]]] = {}
        at_once = {
            (m.trigger % ticks, m.tensor) for m in plan.moves if isinstance(m, Evict) and m.trigger == m.free
        }
        for tick, acts in acts_by_tick(plan, ticks).items():
            for act in acts:
                if (act.verb, act.of) == ("wait", "fetch"):
                    continue
                if act.verb == "evict" and (tick, act.tensor) in at_once:
                    together += 1
                    continue
                found.setdefault(tick, []).append((operation[act.verb], act.tensor))
        table = table_of(plan, ticks)
        assert found == {tick: [(what, tensor) for what, tensor, _ in acts] for tick, acts in table.items()}
        ready = {(m.ready % ticks, m.tensor) for m in plan.moves if isinstance(m, Fetch)}
        waits = [
            (tick, act.tensor)
            for tick, acts in acts_by_tick(plan, ticks).items()
            for act in acts
            if (act.verb, act.of) == ("wait", "fetch")
        ]
        assert sorted(waits) == sorted(ready)
    assert together > 100


class Noted:
    """A replacement of the engine that records all calls of its methods in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given: self.calls.append((name, *given))


def test_graph_with_dynamic_batch_passes_live_bytes_as_integers() -> None:
    """Copy a graph in which nodes compute the sizes that depend on the batch.

    The original graph does not change.
    """
    noted, model = Noted(), Model()
    plan = Plan("", "hand", 0, (), (Fetch("x", "ssd", 1, 2), Evict("y", "ssd", 2)))

    def transform(gm: GraphModule, kind: Any) -> None:
        schedule, _ = fx.insert_slots(gm, kind)
        before = gm.code
        made = materialize.copy_graph_with_moves(gm, plan, 0, len(schedule.slots), noted)
        assert gm.code == before and "teraio_fetch" not in before
        made.graph.lint()
        gm.graph = made.graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=fx.make_aot_backend(transform), dynamic=True)
    batch = torch.randn(4, WIDTH)
    assert compiled(batch) == model(batch)
    torch._dynamo.reset()
    opened = [call for call in noted.calls if call[0] in {"slot", "take_in"}]
    assert [call[1] for call in opened] == [*range(len(opened))] and len(opened) > 3
    assert all(len(call) == 3 or type(call[3]) is int for call in opened)
    assert any(len(call) == 4 and call[3] > 0 for call in opened)
    moves = [(call[0], *call[1:]) for call in noted.calls if call[0] in materialize.VERBS]
    assert moves == [("fetch", "x", "ssd"), ("drop", "y", "ssd"), ("wait", "x", "fetch")]
    assert [call[1] for call in noted.calls if call[0] == "ensure"] == [1, 2]


def test_graph_without_move_runner_raises_when_run() -> None:
    graph = torch.fx.Graph()
    given = graph.placeholder("given")

    def teraio_slot(index: int, tensors: Any) -> None: ...

    graph.call_function(teraio_slot, (0, (given,)))
    graph.output(given)
    made = materialize.copy_graph_with_moves(GraphModule({}, graph), Plan("", "hand", 0), 0, 1)
    assert "teraio_slot(0, (given,))" in made.code
    with pytest.raises(AssertionError, match="to be printed"):
        made(torch.ones(1))
