"""Activations that are made again: the same numbers, within the budget, with fewer bytes moved; compiled once
more, or once when a plan knows it; what must not run twice does not."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from teraio import session
from teraio.errors import UnsupportedError
from teraio.options import Options
from teraio.passes import partition
from teraio.plan import Plan, Remade
from teraio.remade import Remaking
from teraio.schedule import Buffer, Call, Schedule, Slot, Step

HERE = Path(__file__).parent
BUDGETS = {"mlp": 11_000_000, "attention": 19_000_000, "dropout": 11_000_000, "checkpoint": 11_000_000}


def child(runs: list[dict[str, Any]]) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "recompute_train.py"), json.dumps(runs)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    results["log"] = done.stderr
    return results


def runs_of(model: str) -> list[dict[str, Any]]:
    auto = {"model": model, "budget": BUDGETS[model], "options": {"recompute": "auto"}}
    return [
        {"name": f"{model} plain", "model": model, "plain": True},
        {**auto, "name": f"{model} auto"},
        {"name": f"{model} cut", "model": model, "cut": f"{model} auto"},
    ]


@cache
def trained() -> dict[str, Any]:
    mlp = {"model": "mlp", "budget": BUDGETS["mlp"]}
    again = {**mlp, "options": {"recompute": "auto"}}
    more = [
        {**mlp, "name": "off"},
        {**mlp, "name": "replay", "replay": "mlp auto"},
        {**again, "name": "first", "cache": True},
        {**again, "name": "second", "cache": True},
    ]
    return child([run for model in BUDGETS for run in runs_of(model)] + more)


@pytest.mark.parametrize("model", BUDGETS)
def test_what_is_made_again_changes_no_bit_and_keeps_the_budget(model: str) -> None:
    plain, auto, cut = (trained()[f"{model} {name}"] for name in ("plain", "auto", "cut"))
    assert auto["nodes"] and auto["compiles"] == 2 and cut["compiles"] == 1
    assert auto["nodes"] == cut["nodes"]
    assert plain["losses"] == auto["losses"] == cut["losses"]
    assert plain["digest"] == auto["digest"] == cut["digest"]
    assert max(auto["peaks"]) <= BUDGETS[model] < max(plain["peaks"])
    assert max(cut["peaks"]) < max(plain["peaks"])  # without a budget, it saves less


def test_fewer_bytes_are_moved_than_without() -> None:
    runs = trained()
    written = {name: runs[name]["counts"][-1]["written_bytes"] for name in ("off", "mlp auto")}
    assert written["mlp auto"] < 0.8 * written["off"]
    assert runs["off"]["compiles"] == 1


def test_no_random_operator_runs_again_and_no_checkpoint_is_undone() -> None:
    assert not [node for node in trained()["dropout auto"]["nodes"] if "rand" in node or "bernoulli" in node]
    # What the checkpointed part leaves, and the input of the next, are the user's to save.
    assert all(node.startswith(("sigmoid", "gelu", "erf")) for node in trained()["checkpoint auto"]["nodes"])


def test_a_plan_file_is_compiled_once_and_followed() -> None:
    replay, auto = trained()["replay"], trained()["mlp auto"]
    assert replay["compiles"] == 1 and replay["nodes"] == auto["nodes"]
    assert replay["digest"] == auto["digest"]
    assert replay["counts"][-1]["planned_moves"] > 0


def test_a_kept_plan_is_compiled_once_and_followed_from_the_second_step_on() -> None:
    first, second = trained()["first"], trained()["second"]
    assert first["compiles"] == 2 and second["compiles"] == 1
    assert second["nodes"] == first["nodes"] and second["digest"] == first["digest"]
    assert second["counts"][1]["planned_moves"] > 0
    assert {each["node"] for each in first["kept"]["remade"]} == set(first["nodes"])


def test_inductor_compiles_once_more_and_finds_its_programs_again() -> None:
    asked = {"model": "mlp", "layers": 2, "budget": 9_500_000, "cache": True}
    auto = {**asked, "options": {"recompute": "auto", "inner": "inductor"}}
    cut = {"model": "mlp", "layers": 2, "name": "cut", "cut": "auto", "options": {"inner": "inductor"}}
    runs = child([{**auto, "name": "auto"}, {**auto, "name": "later"}, cut])
    assert runs["auto"]["nodes"] and runs["auto"]["nodes"] == runs["later"]["nodes"] == runs["cut"]["nodes"]
    assert (runs["auto"]["compiles"], runs["later"]["compiles"]) == (2, 1)
    assert runs["auto"]["losses"] == runs["later"]["losses"] == runs["cut"]["losses"]
    assert runs["auto"]["digest"] == runs["later"]["digest"] == runs["cut"]["digest"]
    assert max(runs["auto"]["peaks"]) <= 9_500_000


# ---- what may run twice ----


def cut(
    function: Callable[..., torch.Tensor], *inputs: torch.Tensor, again: tuple[str, ...] = ()
) -> tuple[partition.Partition, torch.fx.GraphModule, torch.fx.GraphModule]:
    """The cut of a function's joint graph: what is known of it, forward and backward."""
    seen: list[torch.fx.GraphModule] = []

    def look(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        seen.append(gm)
        return nop(gm, example_inputs)

    partitioner = functools.partial(
        partition.cut_as_asked, min_cut_rematerialization_partition, lambda graph: again
    )
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    compiled = aot_function(function, fw_compiler=look, bw_compiler=look, partition_fn=partitioner)
    compiled(*leaves).sum().backward()
    found = partition.of(seen[0])
    assert found is not None
    return found, seen[0], seen[1]


SQUARE = torch.ones(8, 8)


def targets(gm: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x @ w).tanh() @ w).tanh() @ w


def test_what_is_asked_for_is_made_again_and_the_rest_stays_saved() -> None:
    about, _, backward = cut(chain, SQUARE, SQUARE)
    assert {"tanh", "tanh_1"} <= about.possible
    assert "aten.tanh.default" not in targets(backward)
    again, forward, backward = cut(chain, SQUARE, SQUARE, again=("tanh",))
    assert again.graph == about.graph
    assert "tanh" not in again.nodes and "tanh_1" in again.nodes
    assert targets(backward).count("aten.tanh.default") == 1
    assert not partition.of(backward) and forward


def test_what_nobody_saves_is_not_made_again() -> None:
    asked, _, backward = cut(chain, SQUARE, SQUARE, again=("nobody", "mm"))
    assert asked == cut(chain, SQUARE, SQUARE)[0]
    assert "aten.tanh.default" not in targets(backward)


def noisy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout((x @ w).tanh(), 0.5) @ w


def written(x: torch.Tensor, w: torch.Tensor, running: torch.Tensor) -> torch.Tensor:
    y = (x @ w + running).tanh()
    running.add_(1)
    return y.square() @ w


def test_random_numbers_and_what_reads_a_written_argument_are_not_made_again() -> None:
    about, forward, backward = cut(noisy, SQUARE, SQUARE)
    random = {n.name for n in forward.graph.nodes if "rand" in n.name or "dropout" in n.name}
    assert random and not random & about.possible
    everything, _, backward = cut(noisy, SQUARE, SQUARE, again=about.nodes)
    assert not [target for target in targets(backward) if "rand" in target or "dropout" in target]
    running = torch.ones(8, 8, dtype=torch.float64)
    about, _, _ = cut(lambda x, w: written(x, w, running.float()), SQUARE, SQUARE)
    assert everything.graph != about.graph


def test_a_planted_random_operator_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "_repeatable", lambda node, wanted: True)
    about, forward, _ = cut(noisy, SQUARE, SQUARE)
    assert {n.name for n in forward.graph.nodes if "rand" in n.name or "dropout" in n.name} & about.possible


def test_the_users_own_choice_stays() -> None:
    """Saved by a policy of selective checkpointing: never made again. Made again by it: never saved."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        mine = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if mine else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(chain, x, w, use_reentrant=False, context_fn=contexts)
        return made.sigmoid() @ w

    compiled: list[partition.Partition] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        from teraio.passes import fx

        def look(graph: torch.fx.GraphModule, kind: str) -> None:
            if kind == "forward":
                found = partition.of(graph)
                assert found is not None
                compiled.append(found)

        return fx.compiler(look)(gm, inputs)

    leaves = [torch.ones(8, 8, requires_grad=True) for _ in range(2)]
    torch.compile(model, backend=backend)(*leaves).sum().backward()
    torch._dynamo.reset()
    (about,) = compiled
    assert any(node.startswith("mm") for node in about.nodes)
    assert not any(node.startswith("mm") for node in about.possible)
    assert not any(node.startswith("tanh") for node in about.nodes)


# ---- which programs ----


def step_of(*calls: tuple[str, str]) -> Step:
    """A step whose forwards, of these joint graphs, each leave 100 bytes under this name."""
    made = []
    for graph, name in calls:
        buffers = (Buffer("a", "saved", 100, again=(1,), nodes=("node_a",)),)
        slots = (Slot("enter", (), (), 0), Slot("k", (), (), 0), Slot("exit", (0,), (4,), 0))
        made.append(
            Call(Schedule("forward", buffers, slots, graph=graph), (name,), (0,) * 3, (0,) * 3, (0,) * 3)
        )
    kinds = tuple((name, "activation", 100, False) for _, name in calls)
    return Step(tuple(made), 0, kinds, frozenset())


def test_a_program_of_several_calls_makes_again_what_most_of_them_want() -> None:
    step = step_of(("g", "0.a"), ("g", "1.a"), ("g", "2.a"), ("h", "3.a"))
    most = Remaking(None, lambda name: None, True)
    assert most.open(step) and most.decide(step, ("0.a", "2.a"))
    assert most.asked("g") == {"node_a"} and not most.asked("h") and not most.open(step)
    assert most.of(step) == (Remade("g", "node_a"),)
    few = Remaking(None, lambda name: None, True)
    assert not few.decide(step, ("0.a",)) and not few.open(step)


def test_the_key_of_caches_has_all_that_is_made_again() -> None:
    none, one = (Remaking(None, lambda name: None, True) for _ in range(2))
    one.decide(step_of(("g", "0.a")), ("0.a",))
    file = Remaking(Plan("", "", 0, remade=(Remade("g", "node_a"),)), lambda name: None, False)
    assert none.key != one.key == file.key and file.asked("g") == {"node_a"}


def test_another_partitioner_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from teraio.passes import inductor_partition

    session._refuse(Options.parse({"recompute": "auto"}, {}))
    monkeypatch.setattr(inductor_partition.config, inductor_partition.SETTING, object())
    with pytest.raises(UnsupportedError, match="custom_partitioner_fn"):
        inductor_partition.refuse_other(True)
    inductor_partition.refuse_other(False)
    assert inductor_partition.patch(lambda graph: (), "", "") == {}
