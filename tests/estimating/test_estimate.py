"""Tests of estimates. An estimated step has the same kernels, tensors and bytes as a measured step."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import teraio
from teraio.cli import main
from teraio.cli.demo_model import Llama, Shape
from teraio.errors import FileFormatError, OptionError, TeraioError, UnsupportedError
from teraio.estimating import machines
from teraio.estimating.answer import Estimate
from teraio.formats import shipped_files
from teraio.formats.plan_cache import fingerprint_of_profile
from teraio.formats.profile import Profile
from teraio.passes.planner.problem.problem import build_problem
from teraio.passes.synth import operator_costs
from teraio.passes.synth.roofline import Rates
from teraio.runtime.device import choose, rss
from teraio.session.session import RESERVE_BYTES

MIB = 2**20
LARGE = torch.empty(0)  # a tensor of zero bytes
SMALL = Shape(vocabulary=512, hidden=128, intermediate=384, layers=1, heads=4)
H100 = "h100-4ssd"
LOG = logging.getLogger("tests.estimate")

Loss = Callable[[Any], torch.Tensor] | None


class Perceptron(nn.Module):
    """A perceptron whose step also changes batch-norm statistics and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(256, 768), nn.BatchNorm1d(768), nn.GELU(), nn.Dropout(0.1)),
            *(nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 64)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


class Case:
    """A new model with a batch and an optimizer."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.loss: Loss = None
        if name == "llama":
            self.model: nn.Module = Llama(SMALL)
            tokens = torch.randint(0, SMALL.vocabulary, (8, 64))
            self.batch: tuple[torch.Tensor, ...] = (tokens, tokens)
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        else:
            self.model, self.batch = Perceptron(), (torch.randn(1024, 256),)
            self.loss = lambda output: output.square().mean()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def estimate(self, memory: str = "20MiB", machine: Any = H100, **more: Any) -> Estimate:
        own = {"optimizer": self.optimizer, "loss": self.loss, "updates": "step"}
        given = {"machine": machine, **own, **more}
        return teraio.estimate(self.model, self.batch, memory, **given)

    def train(
        self, options: dict[str, Any], steps: int = 4, after: Callable[[], Any] = lambda: None
    ) -> list[float]:
        compiled = torch.compile(self.model, backend="teraio", options={"inner": "eager", **options})
        losses = []
        for _ in range(steps):
            output = compiled(*self.batch)
            loss = output if self.loss is None else self.loss(output)
            del output
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
            after()
        return losses


@pytest.fixture(autouse=True)
def _nothing_left(nothing_left: None) -> Iterator[None]:
    yield


@pytest.fixture
def toy(tmp_path: Path) -> str:
    """Return the machine file of a machine that computes on this CPU.

    On this machine, buffers of the drive are in the same memory as tensors.
    """
    path = tmp_path / "toy.machine.json"
    toys.machine(2**33, 2**40, 10**9).write(path)
    return str(path)


@pytest.mark.parametrize("name", ["llama", "perceptron"])
def test_an_estimated_step_equals_the_measured_one(name: str, toy: str, tmp_path: Path) -> None:
    """Compare the estimated step with the measured step: the kernels in order, and the tensors with their
    bytes and uses.

    If the model computes the loss, the bytes that cannot move are equal in both steps. If the training loop
    computes the loss, the estimated peak may exceed the measured peak by up to 4 %.
    """
    estimated = Case(name).estimate(machine=toy).profile
    path = tmp_path / "run.profile.json"
    Case(name).train({"memory": "20MiB", "profile": str(path), "warmup": 1, "planner": "greedy"})
    measured = Profile.read(path)
    assert [k.name for k in estimated.kernels] == [k.name for k in measured.kernels]
    assert {t.name: t for t in estimated.tensors} == {t.name: t for t in measured.tensors}
    assert fingerprint_of_profile(estimated) == fingerprint_of_profile(measured)
    ours, theirs = ([k.workspace_bytes for k in of.kernels] for of in (estimated, measured))
    if name == "llama":
        assert ours == theirs
    assert all(one + 4096 > other for one, other in zip(ours, theirs)), list(zip(ours, theirs))
    peaks = [int(build_problem(of).live.max()) for of in (estimated, measured)]
    assert 1 <= peaks[0] / peaks[1] <= 1.04


def test_estimated_memory_matches_plain_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the estimated bytes with the bytes that the allocator counts. The two may differ by up to 0.5
    %."""
    device = choose.choose_device("cpu")
    if not device.spares:  # type: ignore[attr-defined]
        pytest.skip("no compiler, so nothing counts the bytes of tensors")
    monkeypatch.setenv("TERAIO_DISABLE", "1")
    gc.collect()  # frees the tensors of other tests before this test counts bytes
    before = device.used_bytes()
    case = Case("llama")
    case.train({}, 2)
    device.reset_peak()
    case.train({}, 1)
    measured = device.peak_bytes() - before
    estimated = case.estimate().peak_bytes - RESERVE_BYTES
    assert abs(estimated - measured) <= measured * 0.005, (estimated, measured)


@pytest.mark.parametrize("late", [False, True])
def test_a_run_follows_the_plan_of_an_estimate(late: bool, toy: str, tmp_path: Path) -> None:
    """Check that a run follows the estimate's plan, and plans nothing itself.

    The losses equal the losses of a run with enough memory. Between two steps the run makes another estimate,
    for which the engine fetches no weight.
    """
    found = Case("perceptron").estimate("20MiB", toy, updates="late" if late else "step")
    assert found.fits and found.plan is not None and found.plan.moves and bool(found.plan.late) == late
    assert ("updated in the next forward" in str(found)) == late
    found.plan.write(tmp_path / "run.plan.json")
    case = Case("perceptron")
    steps, after = (7, lambda: None) if late else (4, case.estimate)
    losses = case.train({"memory": "20MiB", "plan": str(tmp_path / "run.plan.json")}, steps, after)
    stats = teraio.stats()
    assert stats["phase"] == "planned" and stats["planned_moves"] > 0 and stats["step_misses"] == 0
    assert stats["touches"] == 0 and stats["evictions"] > 0
    torch._dynamo.reset()
    assert losses == Case("perceptron").train({"memory": "1GiB"}, steps)
    assert (stats["late_updates"] > 0) == late


def test_other_commands_accept_the_profile_of_an_estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Case("perceptron").estimate()
    found.profile.write(tmp_path / "run.profile.json")
    machine = str(shipped_files.MACHINES.path_of(H100))
    flags = ["--machine", machine, "--memory", "20MiB", "--planner", "greedy", "--json"]
    assert main.main(["plan", str(tmp_path / "run.profile.json"), *flags]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["step_ns"], made["compute_ns"]) == (found.step_ns, found.compute_ns)


def test_a_large_model_is_estimated_without_allocating_it() -> None:
    shape = Shape(vocabulary=32_000, hidden=8192, intermediate=28_672, layers=1, heads=64, key_heads=8)
    with torch.device("meta"):
        model, tokens = Llama(shape), torch.empty(1, 1024, dtype=torch.long)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    before = rss.resident_bytes()
    rss.reset_peak()
    found = teraio.estimate(model, (tokens, tokens), "15GiB", machine=H100)
    assert rss.peak_bytes() - before < 200 * MIB
    assert weights > 5 * 2**30 and found.fits
    assert found.bytes_of_kind("weight") == found.bytes_of_kind("grad") == weights
    assert found.bytes_of_kind("state") == 2 * weights
    assert found.smallest_bytes < 15 * 2**30 < 4 * weights < found.peak_bytes
    assert found.step_ns is not None and found.bound_ns is not None
    assert found.compute_ns <= found.bound_ns <= found.step_ns


def test_an_estimate_does_not_change_the_model() -> None:
    case = Case("perceptron")
    model = case.model
    before = {name: (t.clone(), t._version) for name, t in model.state_dict().items()}
    random, flags = torch.get_rng_state(), [p.requires_grad for p in model.parameters()]
    case.estimate()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name][0]) and tensor._version == before[name][1], name
    assert torch.equal(torch.get_rng_state(), random) and model.training
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_estimate_does_not_affect_later_compiles() -> None:
    """Check that the next compile of the model still gets static sizes.

    The test first estimates ten batch sizes, more than Dynamo compiles for one function.
    """
    model, seen = nn.Linear(256, 64), []
    for rows in range(32, 42):
        teraio.estimate(model, torch.empty(rows, 256), "1GiB", machine=H100)

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        seen.append([type(size) for value in inputs for size in value.shape])
        return gm.forward

    torch.compile(model, backend=backend)(torch.randn(16, 256))
    assert len(seen) == 1 and set(seen[0]) == {int}


NAMES = ["adagrad", "adafactor", "nadam", "sgd"]


@pytest.mark.parametrize("name", NAMES)
def test_estimated_states_equal_the_optimizers_states(name: str) -> None:
    model = nn.Linear(512, 256)
    kinds = {kind.lower(): made for kind, made in vars(torch.optim).items() if isinstance(made, type)}
    optimizer = kinds[name](model.parameters())
    found = teraio.estimate(model, torch.empty(32, 512), "1GiB", machine=H100, optimizer=name)
    model(torch.randn(32, 512)).sum().backward()
    optimizer.step()
    made = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    large = [tensor.nbytes for tensor in made if tensor.nbytes >= 4096]
    assert sorted(t.size_bytes for t in found.profile.tensors if t.kind == "state") == sorted(large)


def test_tied_frozen_and_shared_tensors_count_once() -> None:
    """Estimate a model with tied, frozen and constant tensors. Its forward also logs a line."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(512, 64), nn.Linear(64, 512, bias=False)
            self.head.weight = self.table.weight
            self.fixed = nn.Linear(64, 64, bias=False).requires_grad_(False)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            LOG.warning("not part of the step")
            logits = self.head(self.fixed(self.table(ids))) * torch.tensor([2.0])
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    ids = torch.zeros(4, 128, dtype=torch.long)
    found = teraio.estimate(Tied(), {"ids": ids, "labels": ids}, "1GiB", machine=H100)
    table, fixed = 512 * 64 * 4, 64 * 64 * 4
    assert found.bytes_of_kind("weight") == table + fixed
    assert (found.bytes_of_kind("grad"), found.bytes_of_kind("state")) == (table, 2 * table)


def test_an_estimate_prints_as_text(toy: str) -> None:
    case = Case("perceptron")
    text = str(case.estimate())
    assert text.startswith("Perceptron within 20 MiB on h100-4ssd (from data sheets, not measured)\n")
    assert "fits:" in text and "yes, with" in text and "to host" in text and "optimizer states" in text
    assert "Times are a roofline, not measured." in text and "the optimizer is SGD" in text
    assert "nothing has to move" in str(case.estimate("1GiB"))
    none = case.estimate("3MiB", toy)
    assert not none.fits and none.step_ns is None and none.bound_ns is None
    assert f"no: step needs {none.smallest_bytes} bytes at kernel" in str(none)
    least = case.estimate("min", toy)
    assert least.fits and least.memory_bytes == least.smallest_bytes == none.smallest_bytes
    assert least.memory_bytes <= least.plan.predicted.peak_bytes  # type: ignore[union-attr]


def test_this_machine_is_measured() -> None:
    found = Case("perceptron").estimate("50%", machine=None)
    assert found.origin.startswith("measured just now; store in ")
    assert found.machine.name == "here" and {link.target for link in found.machine.links} >= {"ssd"}
    assert found.memory_bytes <= next(t.capacity_bytes for t in found.machine.tiers if t.name == "device")
    assert "GFLOP/s in fp32" in str(found) and found.fits


def test_each_shipped_machine_has_compute_rates() -> None:
    assert len(shipped_files.MACHINES.names()) == 10
    for name in shipped_files.MACHINES.names():
        basis = machines.find_machine_and_speeds(name, torch.device("cpu"))
        assert basis.machine.name == name and basis.compute.startswith("times by "), name
        assert basis.speeds.half.flop_per_s > basis.speeds.full.flop_per_s


def test_the_cost_of_a_kernel_follows_from_its_shapes() -> None:
    speeds = operator_costs.Speeds(Rates(8 * 10**12, 10**12, 0), Rates(10**12, 10**12, 0))
    aten = torch.ops.aten
    with FakeTensorMode():
        x, w, table = torch.empty(64, 128), torch.empty(128, 32), torch.empty(1000, 32)
        product = operator_costs.cost_of_call(aten.mm.default, (x, w), {}, x @ w)
        assert product == operator_costs.Cost(2 * 64 * 128 * 32, 4 * (64 * 128 + 128 * 32 + 64 * 32))
        assert speeds.duration_ns(product) == -(-product.flop // 1000)
        half = operator_costs.cost_of_call(aten.mm.default, (x.half(), w.half()), {}, (x @ w).half())
        assert half.half and half.flop == product.flop and 2 * half.moved_bytes == product.moved_bytes
        assert operator_costs.cost_of_call(aten.t.default, (x,), {}, x.t()) == operator_costs.NOTHING
        assert speeds.duration_ns(operator_costs.NOTHING) == 0
        assert operator_costs.cost_of_call(aten.add_.Tensor, (x, x), {}, x).moved_bytes == 3 * x.nbytes
        ids = torch.zeros(10, dtype=torch.long)
        looked_up = operator_costs.cost_of_call(aten.embedding.default, (table, ids), {}, table[ids])
        assert looked_up.moved_bytes == 2 * 10 * 32 * 4 + 80
        q = torch.empty(2, 4, 64, 32)
        attention = aten._scaled_dot_product_flash_attention_for_cpu.default
        assert (
            operator_costs.cost_of_call(attention, (q, q, q), {}, (q + 0, q + 0)).flop
            == 4 * 2 * 4 * 64 * 64 * 32
        )


class Branch(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


class Unknown(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[x[:, 0].nonzero()].sum()


def wrong(**changes: Any) -> Callable[[], Estimate]:
    valid = {"model": nn.Linear(64, 64), "batch": torch.empty(8, 64), "memory": "1GiB", "machine": H100}
    return lambda: teraio.estimate(**{**valid, **changes})


WRONG: list[tuple[Callable[[], Any], type[TeraioError], str]] = [
    (
        wrong(model=Branch(64, 64)),
        UnsupportedError,
        r"not one graph: Data-dependent .*test_estimate.py:\d+: ",
    ),
    (wrong(model=Unknown(64, 64)), UnsupportedError, r"size of nonzero depends on .*test_estimate.py:\d+: "),
    (wrong(batch=torch.empty(8, 63)), UnsupportedError, r"fails on this batch: .*\[8, 63\]"),
    (wrong(batch=()), OptionError, "cannot be called with this batch: missing a required argument: 'input'"),
    (wrong(batch=8), OptionError, "batch is of type int; give a tensor"),
    (wrong(model=LARGE), OptionError, "model is of type Tensor"),
    (wrong(model=nn.Linear(64, 64).requires_grad_(False)), OptionError, "no parameter of Linear requires"),
    (wrong(memory="20GB!"), OptionError, "option 'memory': "),
    (wrong(planner="gredy"), OptionError, "did you mean greedy"),
    (wrong(machine="h100-4sd"), FileFormatError, "no machine of that name .* did you mean h100-4ssd"),
    (wrong(machine="./none.machine.json"), FileFormatError, "No such file"),
    (wrong(optimizer="adamv"), OptionError, "not in torch.optim; did you mean adam"),
    (wrong(optimizer=7), OptionError, "optimizer is of type int"),
    (wrong(optimizer=torch.optim.SGD([nn.Parameter(LARGE)])), OptionError, "1 of 1 parameters of the SGD"),
    (wrong(optimizer="lbfgs"), UnsupportedError, "LBFGS cannot step on fake tensors"),
    (wrong(optimizer="muon"), OptionError, "Muon cannot be made for the parameters of Linear"),
    (wrong(loss=lambda output: output), OptionError, r"loss gives a tensor of shape \(8, 64\)"),
    (wrong(batch=torch.empty(8, 64).to_sparse()), UnsupportedError, "layout torch.sparse_coo"),
]


@pytest.mark.parametrize(("estimate", "kind", "message"), WRONG)
def test_an_impossible_estimate_is_refused_by_name(
    estimate: Callable[[], Any], kind: type[TeraioError], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(kind, match=message):
        estimate()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_machine_object_is_accepted() -> None:
    known = shipped_files.read_named_machine(H100)
    slower = replace(known, tiers=tuple(t for t in known.tiers if t.name != "host"))
    links = tuple(link for link in known.links if "host" not in (link.source, link.target))
    case = Case("perceptron")
    found = case.estimate(machine=replace(slower, links=links))
    assert found.origin == "given" and not found.moved_bytes_by_kind("host", evict=True)
    assert found.moved_bytes_by_kind("ssd", evict=True)
