"""Promises about plans that are written into graphs: the same moves in the same order and the same bits as
when the table is followed, and `teraio explain --graph` prints what is in the graphs.
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
def told(tmp_path_factory: pytest.TempPathFactory) -> Training:
    folder = tmp_path_factory.mktemp("run")  # with a profile asked for, the first plan stays
    with steady.planned():
        return train(profile=str(folder / "run.profile.json"), timeline=str(folder / "run.timeline.json"))


# ---- running


def test_a_graph_with_its_moves_written_in_moves_what_the_table_moves_in_that_order(told: Training) -> None:
    table, graph = told.of("table"), told.of("graph")
    assert graph == table
    assert len(table) > 80, "little moved: the test shows little"
    assert {what for _, what, _ in table} >= {"begin_evict", "end_evict", "begin_fetch", "end_fetch"}
    skipped = [after - before for before, after in pairwise(told.skipped)]
    assert skipped[told.last("graph") - 1] == skipped[told.last("table") - 1]


def test_the_numbers_are_the_same_bit_for_bit_whatever_is_written_in_a_graph(
    told: Training, plain: Training
) -> None:
    assert told.losses == plain.losses
    assert told.digest == plain.digest
    assert len(set(plain.losses)) == len(WAYS)


@pytest.mark.parametrize("bug", PLANTED)
def test_these_tests_find_a_planted_bug(told: Training, bug: str) -> None:
    """And nothing but the bug: the step before it was as it should be, and so is the second one after it."""
    at = told.last(bug)
    before, planted, _, after = told.events[at - 1 : at + 3]
    assert before == after == told.of("table") != planted


def test_a_hostile_plan_does_the_same_from_a_graph_as_from_a_table(told: Training) -> None:
    """What cannot be done is skipped in both, and so is what does not fit beside the next kernel."""
    table, graph = told.of(HOSTILE_TABLE), told.of(HOSTILE_GRAPH)
    assert [event for event in graph if event[1] != "end_fetch"] == [e for e in table if e[1] != "end_fetch"]
    assert len(table) > 100 and any(what == "miss" for _, what, _ in table)
    skipped = [after - before for before, after in pairwise(told.skipped)]
    assert skipped[told.last(HOSTILE_GRAPH) - 1] == skipped[told.last(HOSTILE_TABLE) - 1] > 20


def test_what_a_kernel_needs_stays_whatever_a_graph_says(told: Training) -> None:
    at, usual = told.last(UNLAWFUL), told.last("graph")
    assert told.events[at] == told.of("table")
    skipped = [after - before for before, after in pairwise(told.skipped)]
    assert skipped[at - 1] == skipped[usual - 1] + 1


def test_a_read_that_fails_is_tried_again_where_a_kernel_needs_it(told: Training) -> None:
    """A `wait` is a hint, like all of a plan, and it is the `wait` that waits: not the slot after it."""
    more = [event for event in told.of(FAILING) if event not in told.of("table")]
    assert [what for _, what, _ in more] == ["miss"]
    slot, _, name = more[0]
    assert told.of(FAILING).count((slot, "end_fetch", name)) == 2


def test_a_timeline_has_the_kernels_of_such_a_step(told: Training) -> None:
    assert len(told.kernels[0]) > 60
    assert told.kernels[told.last("graph")] == told.kernels[told.last("table")]


# ---- reading


def lines_of(graph: GraphModule, program: Program) -> Iterator[str]:
    """The moves that a graph prints, between the names of its kernels."""
    arrow = {"evict": "evict {} -> {}", "fetch": "fetch {} <- {}", "drop": "drop {}", "wait": "wait {} ({})"}
    for line in graph.code.splitlines():
        if move := re.search(r"teraio_(evict|drop|fetch|wait)\('(.+)', '(\w+)'\)", line):
            yield arrow[move[1]].format(move[2], move[3])
        elif slot := re.search(r"teraio_(?:slot|ensure)\((\d+)[,)]", line):
            yield program.schedule.slots[int(slot[1])].kernel


def printed(text: str) -> dict[int, list[str]]:
    """The lines of each call in a listing, without ticks and what kernels touch."""
    found: dict[int, list[str]] = {}
    for line in text.splitlines():
        if call := re.match(r"call (\d+),", line):
            found[int(call[1])] = []
        elif found:
            found[max(found)].append(re.sub(r"^ *(\d+  )?|  \[.*\]$", "", line))
    return found


def test_explain_prints_what_is_in_the_graphs(told: Training) -> None:
    assert told.plan is not None and told.profile is not None
    found = printed(listing.step_listing_as_text(told.plan, told.profile))
    graphs = [[*lines_of(gm, program)] for gm, (_, program) in zip(told.written, told.graphs)]
    assert len(graphs) == 2 and all(len(lines) > 30 for lines in graphs)
    assert [found[0], found[1]] == graphs
    for bug in (without("evict"), too_late, turned_round):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(listing, "acts_by_tick", lambda *given: bug(acts_by_tick(*given)))  # noqa: B023  called at once
            assert printed(listing.step_listing_as_text(told.plan, told.profile))[0] != graphs[0]


def test_explain_says_which_part_has_no_graph(told: Training) -> None:
    assert told.plan is not None and told.profile is not None
    parts = [*listing.list_calls(told.plan, told.profile)]
    assert [part.optimizer for part in parts] == [False, False, True]
    heads = [
        line
        for line in listing.step_listing_as_text(told.plan, told.profile).splitlines()
        if line[:4] == "call"
    ]
    assert ["no graph" in line for line in heads] == [False, False, True]
    shown = [act for part in parts for line in part.lines for act in line.before]
    assert shown == [
        act for there in acts_by_tick(told.plan, len(told.profile.kernels)).values() for act in there
    ]


def test_explain_prints_a_listing_and_the_same_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The diamond of toys.py: a is made at tick 0 and away until 9, while b is there."""
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


def test_a_reader_who_has_seen_enough_ends_a_listing_without_a_traceback(tmp_path: Path) -> None:
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


# ---- what a plan says, spelled out


def any_plan(seed: int, ticks: int) -> Plan:
    draw = random.Random(seed)
    moves: list[Evict | Fetch] = []
    for number in range(draw.randrange(1, 40)):
        first, second = sorted(draw.randrange(2 * ticks) for _ in range(2))
        first = draw.choice((first, second))
        evict = Evict(f"t{number}", "ssd", second, draw.choice((first, None)))
        moves.append(draw.choice((evict, Fetch(f"t{number}", "host", first, second))))
    return Plan("", "any", 0, (), tuple(moves))


def test_acts_are_the_tables_operations_and_the_waits_for_reads() -> None:
    """Also around the end of the step, and where an eviction begins and ends before the same kernel, which
    the table writes as one operation."""
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
        for tick, there in acts_by_tick(plan, ticks).items():
            for act in there:
                if (act.verb, act.of) == ("wait", "fetch"):
                    continue
                if act.verb == "evict" and (tick, act.tensor) in at_once:
                    together += 1
                    continue
                found.setdefault(tick, []).append((operation[act.verb], act.tensor))
        table = table_of(plan, ticks)
        assert found == {tick: [(what, tensor) for what, tensor, _ in there] for tick, there in table.items()}
        ready = {(m.ready % ticks, m.tensor) for m in plan.moves if isinstance(m, Fetch)}
        waits = [
            (tick, act.tensor)
            for tick, there in acts_by_tick(plan, ticks).items()
            for act in there
            if (act.verb, act.of) == ("wait", "fetch")
        ]
        assert sorted(waits) == sorted(ready)
    assert together > 100


class Noted:
    """In place of an engine: what is called, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given: self.calls.append((name, *given))


def test_a_graph_for_any_batch_says_how_many_bytes_live() -> None:
    """Sizes that depend on the batch are nodes, which come along; the graph that is given stays as it is."""
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


def test_a_graph_that_was_made_to_be_read_says_so_when_it_runs() -> None:
    graph = torch.fx.Graph()
    given = graph.placeholder("given")

    def teraio_slot(index: int, tensors: Any) -> None: ...

    graph.call_function(teraio_slot, (0, (given,)))
    graph.output(given)
    made = materialize.copy_graph_with_moves(GraphModule({}, graph), Plan("", "hand", 0), 0, 1)
    assert "teraio_slot(0, (given,))" in made.code
    with pytest.raises(AssertionError, match="to be read"):
        made(torch.ones(1))
