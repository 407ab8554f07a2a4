"""Tests of slots in FX graphs.

In these tests, the engine evicts all tensors that it may evict. The numbers are bit-equal to the numbers of a
run without slots. No kernel takes more memory than its slot reports.
"""

from __future__ import annotations

import json
import operator
from functools import cache
from typing import Any

import pytest
import slots_models
import sympy  # type: ignore[import-untyped]
import torch
import tree
from children import forked
from torch.fx import GraphModule
from torch.utils._sympy import functions

import teraio
from teraio.formats.schedule import Schedule
from teraio.passes.fx import program
from teraio.passes.fx.symbols import GraphSymbols

SUPPORT = tree.SUPPORT

# Upper limits in bytes for the workspace of library kernels, at the shapes of these tests. A slot does not
# report this workspace.
WORKSPACES = {
    "_scaled_dot_product_flash_attention": 16 * 1024,
    "native_layer_norm_backward": 1024,
    "native_dropout_backward": 64 * 1024,
    "run_": 64 * 1024,  # operators that restore a saved random state: dropout and attention
    "index_put": 4096,
    # This device has no fused kernel, so flex_attention computes all scores together.
    "flex_attention": 640 * 1024,
    "sum": 128 * 1024,  # the kernel converts booleans to integers before it sums them
}
SCALAR_BYTES = 64


def run(*cases: dict[str, Any]) -> list[dict[str, Any]]:
    done = forked(SUPPORT / "slots_child.py", json.dumps(cases))
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


@cache
def eager_runs() -> dict[str, dict[str, Any]]:
    names = list(slots_models.MODELS)
    return dict(zip(names, run(*({"model": name, "inner": "eager"} for name in names))))


def beyond(excess: dict[str, int], workspaces: dict[str, int]) -> dict[str, int]:
    """Return the kernels that take too many bytes beyond the bytes of their slot.

    `workspaces` has a limit for each library kernel. For other kernels, the limit is SCALAR_BYTES.
    """

    def limit(kernel: str) -> int:
        return max(
            (most for name, most in workspaces.items() if kernel.startswith(name)), default=SCALAR_BYTES
        )

    return {kernel: over for kernel, over in excess.items() if over > limit(kernel)}


@pytest.mark.parametrize("model", slots_models.MODELS)
def test_numbers_and_bytes_are_right_if_engine_evicts_everything(model: str) -> None:
    result = eager_runs()[model]
    assert not result.get("error")
    assert result["equal"]
    assert result["evicted"] >= 15, "too few evictions for this test to show anything"
    assert beyond(result["excess"], WORKSPACES) == {}


def test_dynamic_program_is_reused_for_every_batch_size() -> None:
    result = eager_runs()["any batch"]
    assert result["symbolic"][:2] == [True, True]
    assert len(result["kernels"]) <= 4  # two programs for any batch size, and at most two for a batch of one


def slotted(model: torch.nn.Module, batch: torch.Tensor) -> list[tuple[GraphModule, Schedule]]:
    graphs: list[tuple[GraphModule, Schedule]] = []

    def transform(gm: GraphModule, kind: Any) -> None:
        schedule, connect = program.insert_slots(gm, kind)
        connect(lambda index, tensors, live=None: None)
        graphs.append((gm, schedule))

    torch._dynamo.reset()
    torch.compile(model, backend=program.make_aot_backend(transform), dynamic=True)(batch).backward()
    return graphs


def test_slots_are_printed_with_the_graph() -> None:
    about = slots_models.MODELS["any batch"]
    (forward, schedule), (backward, _) = slotted(about.make(), about.input(4))
    assert forward.code.count("teraio_slot(") == len(schedule.slots)
    assert "teraio_slot(0, (" in backward.code


def test_graph_has_no_symbolic_size_at_run_time() -> None:
    """Check that the graph computes the bytes of a slot by plain integer arithmetic."""
    about = slots_models.MODELS["rows of any batch"]
    for gm, schedule in slotted(about.make(), about.input(4)):
        assert schedule.symbolic
        lives = [
            node.args[2]
            for node in gm.graph.nodes
            if node.op == "call_function"
            and len(node.args) == 3
            and getattr(node.target, "__name__", "") == "teraio_slot"
        ]
        assert any(isinstance(live, torch.fx.Node) for live in lives)
        assert "sympy" not in gm.code


def test_data_dependent_size_uses_its_limit_until_it_is_bound() -> None:
    about = slots_models.MODELS["rows"]
    (gm, schedule), _ = slotted(about.make(), about.input(4))
    chosen = next(index for index, slot in enumerate(schedule.slots) if slot.kernel == "index")
    slots = [node for node in gm.graph.nodes if getattr(node.target, "__name__", "") == "teraio_slot"]
    before = inputs_of(slots[chosen].args[2])
    after = [inputs_of(slot.args[2]) for slot in slots[chosen + 1 :] if len(slot.args) == 3]
    gm.graph.lint()  # checks that every node is before its uses
    rows = {node.name for node in gm.graph.nodes if node.target == "size" and node.args[0].name == "index"}
    assert rows, "no node reads the number of rows"
    assert before and not rows & before
    assert any(rows & names for names in after)


@pytest.mark.parametrize("reads_nothing", [False, True])
@pytest.mark.parametrize("view", ["detach", "_unsafe_view", "split"])
def test_view_shares_the_storage_of_its_source(view: str, reads_nothing: bool) -> None:
    graph, aten = torch.fx.Graph(), torch.ops.aten
    source = graph.placeholder("source")
    source.meta["val"] = torch.empty(8)
    match view:
        case "detach":
            seen = graph.call_function(aten.detach.default, (source,))
        case "_unsafe_view":
            seen = graph.call_function(aten._unsafe_view.default, (source, [2, 4]))
        case _:
            parts = graph.call_function(aten.split.Tensor, (source, 4))
            parts.meta["val"] = [torch.empty(4), torch.empty(4)]
            seen = graph.call_function(operator.getitem, (parts, 0))
    # The fake value has its own storage, like the value of a view of a saved tensor in a backward.
    seen.meta["val"] = torch.empty(8)
    used = graph.call_function(aten.neg.default, (seen,))
    used.meta["val"] = torch.empty(8)
    graph.output((used,))
    schedule, _ = program.insert_slots(GraphModule(torch.nn.Module(), graph), "inference", reads_nothing)
    assert len(schedule.slots) == (3 if reads_nothing else 4)
    last = next(slot for slot in schedule.slots if slot.kernel == used.name)
    assert [schedule.buffers[buffer].name for buffer in last.buffers] == ["source"]
    assert not any(slot.live_bytes for slot in schedule.slots[:-2]), "a view takes no bytes"


def test_view_of_constant_adds_no_buffer() -> None:
    graph, root = torch.fx.Graph(), torch.nn.Module()
    root.register_buffer("constant", torch.ones(8))
    constant = graph.get_attr("constant")
    seen = graph.call_function(torch.ops.aten.detach.default, (constant,))
    for node in (constant, seen):
        node.meta["val"] = torch.empty(8)
    graph.output((seen,))
    schedule, _ = program.insert_slots(GraphModule(root, graph), "inference")
    assert all("constant" not in buffer.name for buffer in schedule.buffers)


def inputs_of(value: Any) -> set[str]:
    """Return the names of the value's node and of all nodes from which it is computed."""
    if not isinstance(value, torch.fx.Node):
        return set()
    return {value.name}.union(*(inputs_of(node) for node in value.all_input_nodes))


S, T = sympy.symbols("s t", integer=True, positive=True)
SIZES = (
    # The kind of size that F.interpolate with a scale factor gives.
    functions.TruncToInt(functions.IntTrueDiv(S, T) * 3.7) * 4,
    functions.CeilToInt(functions.IntTrueDiv(S, T)),
    functions.FloorToInt(functions.IntTrueDiv(S, 7)),
    functions.RoundToInt(functions.IntTrueDiv(S, 7) * 2.0),
    functions.TruncToInt(functions.FloatPow(functions.ToFloat(S), 0.5)),
    functions.TruncToInt(functions.FloatTrueDiv(functions.ToFloat(S), 3.0)),
    functions.FloorDiv(S, T) + functions.Mod(S, T) + functions.PythonMod(S, T) + S**2 * T,
    functions.TruncToInt(functions.TruncToFloat(functions.FloatTrueDiv(functions.ToFloat(S), 3.0)) * 2.0),
    functions.ModularIndexing(S, 2, 5),
    functions.Where(S > T, S, T),
    functions.Max(S, T, 5) - functions.Min(S, T),
    sympy.Piecewise((S, S > T), (T, True)),
    sympy.ceiling(S / 3) + sympy.floor(S / 7),
)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_symbolic_size_becomes_nodes_that_compute_it(size: Any) -> None:
    graph = torch.fx.Graph()
    symbols = GraphSymbols({symbol: (0, graph.placeholder(str(symbol)), None) for symbol in (S, T)})
    graph.output(symbols.insert_size_node(graph, size, at=2))
    computed = GraphModule(torch.nn.Module(), graph)
    for values in ((17, 4), (3, 9), (100, 7)):
        found = computed(*values)
        assert type(found) is int and found == int(size.subs(dict(zip((S, T), values))))


class Convolves(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(1, 64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x[:, 0, :1])
        return out


def test_input_view_of_unknown_storage_gets_a_small_budget(one_thread: None) -> None:
    """Train a convolution on a view of a larger tensor.

    The kernel copies its input, so the budget has room for a copy of the view's size. The size of the larger
    tensor is unknown. If 8192 stood for each unknown dimension, the budget would exceed any memory.
    """
    compiled = torch.compile(
        Convolves(), backend="teraio", dynamic=True, options={"memory": "min", "inner": "eager", "warmup": 1}
    )
    for _ in range(2):
        compiled(torch.randn(6, 2, 3, 32, 40)[1:4]).square().mean().backward()
    assert teraio.stats()["budget_bytes"] < 16 << 20
