"""Tests of recomputed activations: within the same budget, a run computes the same bits and moves fewer
bytes.

The first run with recomputation compiles the model twice. A later run with the plan of this run compiles the
model once. Two kinds of operators are never recomputed: (1) random operators, and (2) operators that read an
argument to which the graph writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import recompute_runs
import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from teraio.errors import UnsupportedError
from teraio.formats.plan import Plan, RecomputedNode
from teraio.formats.schedule import Buffer, Call, Schedule, Slot, Step
from teraio.options import Settings
from teraio.passes.capture import recompute_cut
from teraio.session import session
from teraio.session.recomputation import Recomputation

# Budgets in bytes, by model. The model `attention` has dropout, so it draws random numbers.
BUDGETS = {"mlp": 11_000_000, "attention": 19_500_000, "checkpoint": 11_000_000}


@cache
def trained() -> dict[str, Any]:
    """Run all trainings in one child process, because importing torch takes longer than one training. Return
    the results by name."""
    runs: list[dict[str, Any]] = []
    for model, budget in BUDGETS.items():
        auto = {"model": model, "budget": budget, "options": {"recompute": "auto"}}
        runs.append({"name": f"{model} plain", "model": model, "plain": True})
        runs.append({**auto, "name": f"{model} auto", "cache": model == "mlp"})
    runs += [
        {"name": f"{model} cut", "model": model, "cut": f"{model} auto"} for model in ("mlp", "attention")
    ]
    mlp = {"model": "mlp", "budget": BUDGETS["mlp"]}
    runs.append({**mlp, "name": "off", "steps": 7, "profile": True})
    runs.append({**mlp, "name": "offline", "offline": "off"})
    runs.append({**mlp, "name": "replay", "replay": "mlp auto"})
    runs.append({**mlp, "name": "later", "cache": True, "options": {"recompute": "auto"}})
    return recompute_runs.child(runs)


@pytest.mark.parametrize("model", BUDGETS)
def test_recomputation_keeps_bits_and_budget(model: str) -> None:
    plain, auto = (trained()[f"{model} {name}"] for name in ("plain", "auto"))
    assert auto["nodes"] and (plain["compiles"], auto["compiles"]) == (1, 2)
    assert plain["losses"] == auto["losses"] and plain["digest"] == auto["digest"]
    assert max(auto["peaks"]) <= BUDGETS[model] < max(plain["peaks"])


@pytest.mark.parametrize("model", ["mlp", "attention"])
def test_same_cut_without_budget_keeps_bits_and_saves_less(model: str) -> None:
    plain, auto, cut = (trained()[f"{model} {name}"] for name in ("plain", "auto", "cut"))
    assert cut["compiles"] == 1 and auto["nodes"] == cut["nodes"]
    assert cut["losses"] == auto["losses"] and cut["digest"] == auto["digest"]
    assert max(cut["peaks"]) < 0.9 * max(plain["peaks"]) and not cut["counts"][-1]["written_bytes"]


def test_recomputation_writes_fewer_bytes() -> None:
    runs = trained()
    written = {name: runs[name]["counts"][-1]["written_bytes"] for name in ("off", "mlp auto")}
    # The plan depends on measured times: on busy machines, runs wrote 0.5 to 0.87 of the bytes.
    assert written["mlp auto"] < written["off"]
    assert runs["off"]["compiles"] == 1


def test_recomputation_excludes_random_operators_and_checkpoints() -> None:
    assert not [
        node for node in trained()["attention auto"]["nodes"] if "rand" in node or "bernoulli" in node
    ]
    # All recomputed nodes are outside of the checkpointed parts. Inside of these parts, torch's checkpoint
    # decides which tensors are saved.
    assert all(node.startswith(("sigmoid", "gelu", "erf")) for node in trained()["checkpoint auto"]["nodes"])


def test_plan_file_with_recompute_compiles_once() -> None:
    replay, auto = trained()["replay"], trained()["mlp auto"]
    assert replay["compiles"] == 1 and replay["nodes"] == auto["nodes"]
    assert replay["digest"] == auto["digest"]
    assert replay["counts"][-1]["planned_moves"] > 0


def test_offline_plan_with_recompute_compiles_twice_and_keeps_bits() -> None:
    """The plan file lists tensors to recompute, but its moves are for a step without recomputation.

    teraio therefore uses only the list, compiles the model a second time, and makes a new plan.
    """
    offline, plain, off = (trained()[name] for name in ("offline", "mlp plain", "off"))
    assert offline["nodes"] and offline["compiles"] == 2
    assert offline["losses"] == plain["losses"] and offline["digest"] == plain["digest"]
    assert max(offline["peaks"]) <= BUDGETS["mlp"]
    before, after = (run["counts"][-1]["written_bytes"] for run in (off, offline))
    assert after < before


def test_cached_plan_with_recompute_compiles_once() -> None:
    first, later = trained()["mlp auto"], trained()["later"]
    assert first["compiles"] == 2 and later["compiles"] == 1
    assert later["nodes"] == first["nodes"] and later["digest"] == first["digest"]
    assert later["counts"][1]["planned_moves"] > 0
    assert {each["node"] for each in first["kept"]["remade"]} == set(first["nodes"])


# ---- nodes that may be recomputed ----


def cut(
    function: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
    again: tuple[str, ...] = (),
    needs: recompute_cut.Needs = lambda backward: 0,
) -> tuple[recompute_cut.JointGraphCut, torch.fx.GraphModule, torch.fx.GraphModule]:
    """Cut the joint graph of a function into a forward and a backward. The backward recomputes the nodes in
    `again`.

    Return (1) the record of the cut, (2) the forward graph and (3) the backward graph.
    """
    seen: list[torch.fx.GraphModule] = []

    def look(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        seen.append(gm)
        return nop(gm, example_inputs)

    least = min_cut_rematerialization_partition
    partitioner = functools.partial(recompute_cut.cut_with_recompute, least, lambda graph: (again, 0), needs)
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    compiled = aot_function(function, fw_compiler=look, bw_compiler=look, partition_fn=partitioner)
    compiled(*leaves).sum().backward()
    found = recompute_cut.read_cut_from_meta(seen[0])
    assert found is not None
    return found, seen[0], seen[1]


SQUARE = torch.ones(8, 8)


def targets(gm: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x @ w).tanh() @ w).tanh() @ w


def test_cut_recomputes_chosen_nodes_and_saves_others() -> None:
    about, _, backward = cut(chain, SQUARE, SQUARE)
    assert {"tanh", "tanh_1"} <= about.recomputable_nodes
    assert "aten.tanh.default" not in targets(backward)
    again, forward, backward = cut(chain, SQUARE, SQUARE, again=("tanh",))
    assert again.graph == about.graph
    assert "tanh" not in again.nodes and "tanh_1" in again.nodes
    assert targets(backward).count("aten.tanh.default") == 1
    cut_of_backward = recompute_cut.read_cut_from_meta(backward)
    assert forward and cut_of_backward == recompute_cut.JointGraphCut(about.graph, (), ())


def test_cut_saves_nodes_whose_recomputation_does_not_fit() -> None:
    """The fake `needs` reports more memory for each recomputed node. The cut recomputes fewer nodes until
    they fit."""

    def kernels(backward: torch.fx.GraphModule) -> int:
        return targets(backward).count("aten.tanh.default")

    asked, _, backward = cut(chain, SQUARE, SQUARE, again=("tanh", "tanh_1"), needs=kernels)
    assert kernels(backward) == 0 and {"tanh", "tanh_1"} <= {*asked.nodes}
    asked, _, backward = cut(
        chain, SQUARE, SQUARE, again=("tanh", "tanh_1"), needs=lambda backward: kernels(backward) // 2
    )
    assert kernels(backward) == 1 and "tanh" in asked.nodes and "tanh_1" not in asked.nodes


def test_cut_ignores_nodes_that_are_not_saved() -> None:
    asked, _, backward = cut(chain, SQUARE, SQUARE, again=("nobody", "mm"))
    assert asked == cut(chain, SQUARE, SQUARE)[0]
    assert "aten.tanh.default" not in targets(backward)


def noisy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout((x @ w).tanh(), 0.5) @ w


def masks(forward: torch.fx.GraphModule) -> set[str]:
    """Return the names of two kinds of nodes: random operators, and nodes that read the result of a random
    operator. Skip operators of the backward."""
    nodes = [node for node in forward.graph.nodes if "backward" not in str(node.target)]
    random = {node for node in nodes if "dropout" in str(node.target) or "rand" in str(node.target)}
    return {node.name for node in nodes if node in random or random & {*node.all_input_nodes}}


def test_cut_never_recomputes_random_numbers() -> None:
    about, forward, _ = cut(noisy, SQUARE, SQUARE)
    assert masks(forward) & {*about.nodes} and not masks(forward) & about.recomputable_nodes
    _, _, backward = cut(noisy, SQUARE, SQUARE, again=about.nodes)
    assert not masks(backward)


def test_planted_recompute_of_random_operator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute_cut, "_is_recomputable", lambda node, wanted: True)
    about, forward, _ = cut(noisy, SQUARE, SQUARE)
    assert masks(forward) & about.recomputable_nodes


@pytest.mark.parametrize("writes", [False, True])
def test_reader_of_written_argument_is_not_recomputed(writes: bool) -> None:
    aten, graph = torch.ops.aten, torch.fx.Graph()
    x, running = graph.placeholder("x"), graph.placeholder("running")
    made = graph.call_function(aten.tanh.default, (graph.call_function(aten.add.Tensor, (x, running)),))
    if writes:
        graph.call_function(aten.copy_.default, (running, made))
    for node in graph.nodes:
        node.meta["val"] = SQUARE
    chain = recompute_cut._recompute_chain(made, set(), recompute_cut._written_arguments(graph))
    assert (chain is None) == writes


def test_selective_checkpoint_policy_overrides_recompute() -> None:
    """torch's checkpoint policy takes precedence. teraio never recomputes a tensor that the policy saves, and
    never saves a tensor that the policy recomputes."""

    def policy(state: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        mine = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if mine else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(chain, x, w, use_reentrant=False, context_fn=contexts)
        return made.sigmoid() @ w

    compiled: list[recompute_cut.JointGraphCut] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        from teraio.passes.fx import program

        def look(graph: torch.fx.GraphModule, kind: str) -> None:
            if kind == "forward":
                found = recompute_cut.read_cut_from_meta(graph)
                assert found is not None
                compiled.append(found)

        return program.make_aot_backend(look)(gm, inputs)

    leaves = [torch.ones(8, 8, requires_grad=True) for _ in range(2)]
    torch.compile(model, backend=backend)(*leaves).sum().backward()
    torch._dynamo.reset()
    (about,) = compiled
    assert any(node.startswith("mm") for node in about.nodes)
    assert not any(node.startswith("mm") for node in about.recomputable_nodes)
    assert not any(node.startswith("tanh") for node in about.nodes)


# ---- the choice between programs ----


def step_of(*calls: tuple[str, str]) -> Step:
    """Return a step with one forward per pair (joint graph, name of a tensor).

    Each forward saves one tensor of 100 bytes under the name in its pair.
    """
    made = []
    for graph, name in calls:
        buffers = (Buffer("a", "saved", 100, again=(1,), nodes=("node_a",)),)
        slots = (Slot("enter", (), (), 0), Slot("k", (), (), 0), Slot("exit", (0,), (4,), 0))
        made.append(
            Call(Schedule("forward", buffers, slots, graph=graph), (name,), (0,) * 3, (0,) * 3, (0,) * 3)
        )
    kinds = tuple((name, "activation", 100, False) for _, name in calls)
    return Step(tuple(made), 0, kinds, frozenset())


def test_program_of_several_calls_recomputes_by_majority() -> None:
    step = step_of(("g", "0.a"), ("g", "1.a"), ("g", "2.a"), ("h", "3.a"))
    most = Recomputation(None, lambda name: None, True)
    assert most.is_recompute_undecided(step) and most.mark_tensors_for_recompute(step, ("0.a", "2.a"))
    assert (
        most.nodes_to_recompute("g") == {"node_a"}
        and not most.nodes_to_recompute("h")
        and not most.is_recompute_undecided(step)
    )
    assert most.recomputed_nodes_of(step) == (RecomputedNode("g", "node_a"),)
    few = Recomputation(None, lambda name: None, True)
    assert not few.mark_tensors_for_recompute(step, ("0.a",)) and not few.is_recompute_undecided(step)


def test_cache_key_covers_all_recomputed_nodes() -> None:
    none, one = (Recomputation(None, lambda name: None, True) for _ in range(2))
    one.mark_tensors_for_recompute(step_of(("g", "0.a")), ("0.a",))
    file = Recomputation(Plan("", "", 0, remade=(RecomputedNode("g", "node_a"),)), lambda name: None, False)
    assert none.cache_key != one.cache_key == file.cache_key and file.nodes_to_recompute("g") == {"node_a"}


def test_custom_partitioner_is_refused_with_recompute() -> None:
    from teraio.passes.inductor import partition as inductor_partition

    session._refuse_impossible_options(Settings.parse({"recompute": "auto"}, {}), "cpu")
    with inductor_partition.config.patch({inductor_partition.SETTING: object()}):
        with pytest.raises(UnsupportedError, match="custom_partitioner_fn"):
            inductor_partition.refuse_other_partitioner(True)
        inductor_partition.refuse_other_partitioner(False)
        assert inductor_partition.partitioner_config_patch(lambda graph: ((), 0), "", "") == {}
    assert inductor_partition.partitioner_config_patch(lambda graph: ((), 0), "", "").keys() == {
        inductor_partition.SETTING
    }
