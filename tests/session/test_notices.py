"""Tests of messages to a new user: (1) warnings about mistakes, (2) errors without torch's wrappers, and (3)
lines that describe a step.

teraio warns of each mistake only once, and suggests a correction.
"""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toys
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode

import teraio
from teraio import backend, errors
from teraio.cli import main
from teraio.errors import OptionError, StoreError, TeraioError, UnsupportedError
from teraio.formats.schedule import Call, Schedule, Slot, Step
from teraio.options import Settings
from teraio.passes.capture import aot
from teraio.runtime.device import choose, cpu, device, limits
from teraio.runtime.device.link_rates import LinkRates
from teraio.runtime.step.tracker import EXPECTATIONS_MAX
from teraio.session import session, tiers
from teraio.session.notices import (
    describe_step,
    oversized_budget_lines,
    unknown_variable_lines,
    unmatched_keep_lines,
)
from teraio.units import fmt_bytes, fmt_count

WIDTH = 64
SMALL: dict[str, Any] = {"inner": "eager", "memory": "1GiB", "warmup": 2}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    session._warn_of_unknown_variables.cache_clear()
    yield
    teraio.reset()
    torch._dynamo.reset()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """Yield a function. It takes a text, and returns the logged lines that contain this text."""
    with caplog.at_level(logging.INFO, "teraio"):
        yield lambda words: [r.getMessage() for r in caplog.records if words in r.getMessage()]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x).relu())
        return result


def train(*batches: int, momentum: float = 0.0, **options: Any) -> None:
    """Run a training step for each batch size. For a batch size of 0, run an evaluation instead."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    compiled: Any = torch.compile(model, backend="teraio", dynamic=False, options={**SMALL, **options})
    for batch in batches:
        if batch:
            compiled(torch.ones(batch, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with torch.no_grad():
                compiled(torch.ones(8, WIDTH))


# ---- environment variables


def test_unknown_variable_is_named_with_suggestion() -> None:
    known = {"TERAIO_MEMORY": "1GiB", "TERAIO_DISABLE": "1", "PATH": "/bin", "TERAIO_EMPTY": " "}
    assert unknown_variable_lines(known) == []
    first, second = unknown_variable_lines({**known, "TERAIO_STROE": "/mnt", "TERAIO_MEMROY": "1GiB"})
    assert "TERAIO_MEMROY is no option" in first
    assert "did you mean TERAIO_MEMORY?" in first
    assert "TERAIO_STROE" in second
    assert "did you mean TERAIO_STORE?" in second


def test_unknown_variable_is_warned_of_once_per_process(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    monkeypatch.setenv("TERAIO_WARMPU", "1")
    for _ in range(2):
        train(8)
        teraio.reset()
        torch._dynamo.reset()
    (line,) = logged("TERAIO_WARMPU")
    assert "did you mean TERAIO_WARMUP?" in line


# ---- the memory option


def test_oversized_budget_warning_has_both_sizes(logged: Any) -> None:
    capacity = limits.read_memory_limits().capacity_bytes
    train(8, memory=3 * capacity)
    (line,) = logged("control group has only")
    assert f"memory is {fmt_bytes(3 * capacity, up=True)}" in line
    assert fmt_bytes(capacity) in line


def test_budget_of_all_memory_gives_no_warning() -> None:
    assert oversized_budget_lines(2**30, 2**30) == []
    (line,) = oversized_budget_lines(2**30 + 1, 2**30 - 1)
    assert fmt_bytes(2**30 + 1, up=True) in line


def test_sizes_that_round_equal_are_shown_in_bytes() -> None:
    (line,) = oversized_budget_lines(3 * 2**29, 3 * 2**29 - 1)
    assert "memory is 1610612736 bytes" in line and "has only 1610612735 bytes" in line


# ---- the keep option


def test_unmatched_keep_glob_is_warned_of_at_first_plan(logged: Any) -> None:
    train(8, 8, 8, keep="frist.*,first.*")
    assert logged("option 'keep'") == []
    train(8, 8, 8, 8, keep="frist.*,first.*")
    (line,) = logged("option 'keep'")
    assert "'frist.*' matches none of the" in line
    assert "did you mean first?; such tensors are first.weight, second.weight, " in line


def test_keep_glob_matches_optimizer_states(logged: Any) -> None:
    """The option `keep` also finds optimizer states, although the slots of compiled programs do not list
    these states."""
    train(8, 8, 8, 8, momentum=0.9, keep="*.momentum_buffer,*.momentum")
    (line,) = logged("option 'keep'")
    assert "'*.momentum' matches none of the" in line


def test_unmatched_keep_glob_is_warned_of_once(logged: Any) -> None:
    """Two different steps each get a plan, but the warning appears only once."""
    train(8, 8, 8, 8, 16, 16, 16, 16, 16, keep="*weight,no such tensor,no such tensor")
    assert len(logged("nothing moves")) == 2
    (line,) = logged("option 'keep'")
    assert "'no such tensor' matches none of the" in line
    assert unmatched_keep_lines(["first.*", "1.*"], ["first.weight", "1.mm"]) == []


class Wrapped(nn.Module):
    """A wrapper that forwards attribute access to its inner model, as PEFT's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


def test_weight_has_its_name_in_the_model() -> None:
    for model in (Model(), Wrapped()):
        names: list[str] = []

        def look(gm: torch.fx.GraphModule, inputs: Any, names: list[str] = names) -> Any:
            names += aot.weight_and_buffer_names(gm)
            return gm.forward

        torch.compile(model, backend=look)(torch.ones(1, WIDTH))
        assert set(filter(None, names)) == {name for name, _ in model.named_parameters()}


def test_offline_plan_warns_of_unmatched_keep_glob(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, machine = str(tmp_path / "run.profile.json"), str(tmp_path / "here.machine.json")
    toys.training_profile().write(profile)
    toys.machine(device=10**6).write(machine)
    assert main.main(["plan", profile, "--machine", machine, "--keep", "w1", "--keep", "wx*"]) == 0
    logged = capsys.readouterr().err
    assert "'wx*' matches none of the" in logged
    assert "'w1'" not in logged


# ---- errors


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"memroy": "1GiB"}, OptionError, "did you mean memory?"),
        ({"memory": "20 blobs"}, OptionError, "unknown unit 'blobs'"),
        ({"store": "/proc/none/such"}, StoreError, "/proc/none/such"),
    ],
)
def test_option_error_reaches_user_unwrapped(
    options: dict[str, str], kind: type[TeraioError], words: str
) -> None:
    with pytest.raises(kind) as plain:
        backend._compile_graph(torch.fx.GraphModule(nn.Module(), torch.fx.Graph()), [], {**SMALL, **options})
    compiled: Any = torch.compile(Model(), backend="teraio", options={**SMALL, **options})
    with pytest.raises(kind) as caught:
        compiled(torch.ones(8, WIDTH))
    error = caught.value
    assert words in str(error)
    assert str(error) == str(plain.value)
    assert (type(error).__name__, type(error).__module__) == (kind.__name__, errors.__name__)
    assert error.__cause__ is plain.value.__cause__
    assert vars(error).items() >= vars(plain.value).items()
    assert "convert_frame.py" not in {Path(entry.path).name for entry in caught.traceback}, "Dynamo's frames"
    assert isinstance(error, BackendCompilerFailed), "code that catches this type still catches the error"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (kind, str(error))


# ---- descriptions of steps


def test_measured_step_line_describes_step(logged: Any) -> None:
    # Two evaluations run each time, because the engine would count a single evaluation as a part of the next
    # step.
    train(8, 8, 8, 0, 0, 16, 0, 0, 16, 0, 0, 16, 0, 0)
    lines = [line.partition("measured step ")[2] for line in logged("measured step")]
    sizes = [fmt_bytes(batch * WIDTH * 4) for batch in (8, 16)]
    print(lines)
    assert len(set(lines)) == len(lines) == 6
    assert re.fullmatch(r"1/2: forward, backward, optimizer( \(.* of activations\))?", lines[0])
    assert any(line.startswith("2/2: forward, backward, optimizer") and sizes[1] in line for line in lines)


def test_step_description_counts_calls() -> None:
    def call(kind: Any) -> Call:
        return Call(Schedule(kind, (), (Slot("enter", (), (), 0),)), (), (0,), (0,), (0,))

    kinds = ["forward", "inference", "forward", "backward", "backward", "optimizer"]
    facts = (("a", "activation", 2**20, False), ("w", "weight", 2**30, True))
    step = Step(tuple(call(kind) for kind in kinds), 1, facts, frozenset())
    assert describe_step(step) == "2 forward, inference, 2 backward, optimizer (1 MiB of activations)"


def test_fmt_count_uses_singular_for_one() -> None:
    assert [fmt_count(count, "weight") for count in (0, 1, 2)] == ["0 weights", "1 weight", "2 weights"]


# ---- courses (records of steps) and devices


def test_courses_of_old_steps_are_deleted() -> None:
    """A course holds the measured steps and the plan for one order of programs in a step.

    The session keeps at most EXPECTATIONS_MAX courses. A new step that repeats often enough still gets a
    plan.
    """
    running = session.Session(Settings.parse({**SMALL, "warmup": 3}))
    planned: list[Any] = []
    running.engine.settle_plan = lambda plan, order: planned.append(plan)  # type: ignore[misc,method-assign,assignment]
    try:
        for number in range(100):
            running.end_step(step_of(f"k{number}"))
            if number in (20, 27, 34, 41):  # seven other steps run between two steps `again`
                running.end_step(step_of("again"))
            assert len(running.courses) <= EXPECTATIONS_MAX
        assert len(planned) == 1
        for _ in range(4):
            running.end_step(step_of("soon"))
        assert len(planned) == 2
    finally:
        running.engine.fetch_all_and_close()


def test_link_rate_is_sum_of_drives_and_store_weighs_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(directory: Path, device: object, memory_bytes: int) -> LinkRates:
        fast = directory.name == "fast"
        rate = 3 * 10**9 if fast else 10**9
        return LinkRates("ssd", rate, rate, rate, rate, 50_000 + fast, 80_000)

    paths = [tmp_path / name for name in ("slow", "fast", "slow too")]
    drives = dict(zip(paths, (1, 2, 1)))
    monkeypatch.setattr(tiers, "_measure_link_once", link)
    monkeypatch.setattr(session.os, "stat", lambda path: SimpleNamespace(st_dev=drives[path]))
    together, weights = tiers.measure_drives(paths, cpu.CpuDevice(), 2**20)
    assert together.evict_bytes_per_s == together.fetch_bytes_per_s == 4 * 10**9
    assert (together.evict_latency_ns, together.fetch_latency_ns) == (50_001, 80_000)
    assert weights == [10**9, 6 * 10**9, 10**9]


def test_second_device_is_refused() -> None:
    session.ensure_session(Settings.parse(SMALL))
    try:
        with pytest.raises(UnsupportedError, match="a program on cuda was compiled"):
            session.ensure_session(Settings.parse(SMALL), "cuda")
    finally:
        session.reset()


def test_graph_of_scalars_gets_device_of_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeTensorMode():
        loss, weight = torch.empty((), device="cuda"), torch.empty(4, device="cuda")
    rate, batch = torch.tensor(0.1), torch.ones(4)

    def on(*graphs: list[Any]) -> list[str]:
        return [str(backend._device_of_graph(graph_of(), graph)) for graph in graphs]

    found = on([loss], [weight, rate], [rate], [batch], [], [1, "a"])
    assert found == ["cuda:0", "cuda:0", "cpu", "cpu", "cpu", "cpu"]
    gpu = SimpleNamespace(device=torch.device("cuda", 1))
    monkeypatch.setattr(session, "SESSION", SimpleNamespace(device=gpu))
    assert on([rate], [batch], []) == ["cuda:1", "cpu", "cuda:1"]


def graph_of(*values: Any) -> torch.fx.GraphModule:
    """Return an FX graph with one placeholder per value. The value is the placeholder's example value."""
    graph = torch.fx.Graph()
    for number, value in enumerate(values):
        graph.placeholder(f"x{number}").meta["example_value"] = value
    graph.output(None)
    return torch.fx.GraphModule({}, graph)


def test_graph_on_two_gpus_is_refused() -> None:
    """One node on the second GPU is enough to raise the error."""
    with FakeTensorMode():
        one, two = torch.empty(4, device="cuda:0"), torch.empty(4, device="cuda:1")
    assert backend._device_of_graph(graph_of(one), [one]) == torch.device("cuda", 0)
    with pytest.raises(UnsupportedError, match=r"cuda:0 and cuda:1.*Put the model on one device"):
        backend._device_of_graph(graph_of(one, two), [one, two])
    with pytest.raises(UnsupportedError, match="cuda:0 and cuda:1"):
        backend._device_of_graph(graph_of(one, (two, 1)), [one])


def test_second_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = Settings.parse(SMALL)
    gpu = SimpleNamespace(device=torch.device("cuda", 1))
    monkeypatch.setattr(session, "SESSION", SimpleNamespace(device=gpu, options=parsed))
    session.ensure_session(parsed, torch.device("cuda", 1))
    with pytest.raises(
        UnsupportedError, match=r"memory of cuda:1 .* on cuda:0 was compiled.*teraio.reset\(\)"
    ):
        session.ensure_session(parsed, torch.device("cuda", 0))


def test_session_opens_device_of_program(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[torch.device] = []

    def one(on: torch.device) -> device.Device:
        opened.append(on)
        raise StopIteration

    monkeypatch.setattr(choose, "choose_device", one)
    with pytest.raises(StopIteration):
        session.ensure_session(Settings.parse(SMALL), "cuda:1")
    assert opened == [torch.device("cuda", 1)] and session.SESSION is None


def step_of(kernel: str) -> Step:
    schedule = Schedule("inference", (), (Slot("enter", (), (), 0), Slot(kernel, (), (), 0)))
    return Step((Call(schedule, (), (10, 20), (0, 0), (0, 0)),), 30, (), frozenset())
