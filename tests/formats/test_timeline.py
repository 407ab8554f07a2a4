"""Tests of measured timelines. Their kernels, transfers, stalls and bytes match the step and the ledger."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import Counter as Count
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_run
import pytest
import torch
import toys
from torch import nn

import teraio
from teraio.cli import main
from teraio.errors import BudgetError, OptionError
from teraio.formats.plan import Plan
from teraio.formats.profile import Profile
from teraio.formats.schedule import Step
from teraio.formats.timeline import Stall, Timeline
from teraio.runtime.engine import engine
from teraio.runtime.ledger.record import State
from teraio.runtime.ledger.recorder import RecordedMove, RecordedStep, Recorder
from teraio.session import session
from teraio.session.plan_choice import Work
from teraio.session.planning import Planning

WIDTH = 512  # each layer's weight is 1 MiB
LAYERS = 6


pytestmark = pytest.mark.usefixtures("nothing_left")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x).relu()
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def train(steps: int, evaluate: bool = False, **options: Any) -> Iterator[int]:
    """Train a model and yield the number of each step."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    all_options = {"inner": "eager", "memory": "15MiB", "warmup": 1, "planner": "greedy", **options}
    compiled = torch.compile(model, backend="teraio", options=all_options)
    for step in range(steps):
        compiled(torch.randn(16, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step
    if evaluate:
        with torch.no_grad():
            for _ in range(3):
                compiled(torch.randn(16, WIDTH))


def counts() -> dict[str, int]:
    return {name: count for name, count in teraio.stats().items() if isinstance(count, int)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Timeline, Profile, dict[str, int]]:
    """Run six steps, of which the last four follow a plan.

    Return (1) the timeline, (2) the profile, and (3) the increase of the engine's counts in the last step.
    """
    folder = tmp_path_factory.mktemp("timeline")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERAIO_CACHE_DIR", "off")
        before: dict[str, int] = {}
        files: dict[str, Any] = {name: str(folder / f"{name}.json") for name in ("timeline", "profile")}
        for step in train(6, **files):
            if step == 4:
                before = counts()
        after = counts()
        teraio.reset()
    torch._dynamo.reset()
    added = {name: after[name] - before[name] for name in after}
    return Timeline.read(files["timeline"]), Profile.read(files["profile"]), added


Ran = tuple[Timeline, Profile, dict[str, int]]


def test_kernels_match_the_step_and_do_not_overlap(ran: Ran) -> None:
    line, profile, _ = ran
    kernels = [span for span in line.spans if span.track == "compute"]
    assert line.kind == "measured"
    assert [span.name for span in kernels] == [kernel.name for kernel in profile.kernels]
    assert all(one.end_ns <= other.start_ns for one, other in itertools.pairwise(kernels))
    assert kernels[-1].end_ns == line.step_ns > 0


def test_every_transfer_is_recorded_with_its_tensor_and_bytes(ran: Ran) -> None:
    line, profile, added = ran
    sizes = {tensor.name: tensor.size_bytes for tensor in profile.tensors}
    tracks = Count(span.track for span in line.spans)
    assert set(tracks) <= {"compute", "evict:ssd", "fetch:ssd", "drop:ssd"}
    # The test reads the counts between steps. The counts therefore include a few moves of other steps, and
    # miss a few moves of this step.
    assert abs(tracks["fetch:ssd"] - added["fetches"]) <= LAYERS
    assert added["fetches"] > LAYERS, "too few fetches, so the test is weak"
    moved = [span for span in line.spans if span.track in {"evict:ssd", "fetch:ssd"}]
    assert all(span.name == span.tensor and span.bytes == sizes[span.tensor] for span in moved)
    assert all(0 <= span.start_ns <= span.end_ns for span in moved)


def test_recorded_stalls_match_the_counted_stall_time(ran: Ran) -> None:
    line, profile, added = ran
    assert {stall.cause for stall in line.stalls} <= {"late read", "link busy", "miss"}
    assert all(0 <= stall.tick < len(profile.kernels) for stall in line.stalls)
    recorded = sum(stall.ns for stall in line.stalls)
    counted = added["stall_ns"]
    moves = added["fetches"] + added["evictions"]
    assert recorded <= counted * 2 and counted <= recorded * 2 + 10_000 * moves


def test_counters_match_the_ledger_and_respect_the_budget(ran: Ran) -> None:
    """Compare the bytes of all kinds except inputs.

    Inputs may exceed the budget, because they are resident before the program's first slot can make room.
    """
    line, _, _ = ran
    bytes_of: dict[str, int] = {}
    most = 0
    at_ns = [counter.at_ns for counter in line.counters]
    assert at_ns == sorted(at_ns)
    for counter in line.counters:
        assert counter.tier == "device" and counter.bytes >= 0
        bytes_of[counter.kind] = counter.bytes
        most = max(most, sum(bytes_of.values()) - bytes_of.get("input", 0))
    assert {"weight", "grad", "state", "activation", "workspace", "reserve"} <= set(bytes_of)
    assert 0 < most <= line.budget_bytes == 15 * 2**20
    weights = [counter.bytes for counter in line.counters if counter.kind == "weight"]
    assert len(set(weights)) > 1, "no weight was evicted"


def test_missing_evictions_make_the_counters_exceed_the_budget(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Plant a bug: the engine does not report evictions to the recorder.

    The recorded counters then exceed the budget.
    """
    monkeypatch.setattr(Recorder, "subtract_resident_bytes", lambda self, record: None)
    for _ in train(3, timeline=str(tmp_path / "t.json")):
        pass
    teraio.reset()
    line = Timeline.read(tmp_path / "t.json")
    last = {counter.kind: counter.bytes for counter in line.counters}
    assert sum(last.values()) > line.budget_bytes


def test_inference_does_not_replace_a_training_step(tmp_path: Path) -> None:
    for _ in train(4, evaluate=True, timeline=str(tmp_path / "t.json")):
        pass
    teraio.reset()
    line = Timeline.read(tmp_path / "t.json")
    assert any("AdamW" in span.name for span in line.spans)


def test_the_file_is_written_while_the_run_goes_on(tmp_path: Path) -> None:
    """Read the file while the run trains.

    A planned step replaces the measured step in the file before the run ends.
    """
    path = tmp_path / "t.json"
    for step in train(6, timeline=str(path)):
        if step == 2:
            assert path.exists()
            before = path.read_bytes()
    assert path.read_bytes() != before


def test_planning_time_belongs_to_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_plan, delay_s = Planning.choose_plan, 2.0

    def slow(self: Planning, profile: Profile, step: Step) -> Work[Plan | None]:
        time.sleep(delay_s)
        return (yield from choose_plan(self, profile, step))

    monkeypatch.setattr(Planning, "choose_plan", slow)
    monkeypatch.setenv("TERAIO_CACHE_DIR", "off")
    path = tmp_path / "run.timeline.json"
    began_s = time.perf_counter()
    list(train(3, timeline=str(path)))
    assert time.perf_counter() - began_s > delay_s
    teraio.reset()
    line = Timeline.read(path)
    assert 0 < line.step_ns < delay_s * 1e9
    assert line.spans[0].start_ns < 0.9 * delay_s * 1e9


def test_a_run_without_a_timeline_records_nothing() -> None:
    for _ in train(1):
        pass
    running = engine.ENGINE
    assert running is not None and running.mover.recorder is None
    assert "visit" not in vars(running) and not running.mover.store.space.keeps_times
    assert session.SESSION is not None and session.SESSION.recording is None


def test_an_unwritable_timeline_is_logged_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with caplog.at_level(logging.WARNING, "teraio"):
        for _ in train(4, timeline=str(path)):
            pass
        teraio.reset()
    lines = [r.getMessage() for r in caplog.records if "timeline was not written" in r.getMessage()]
    assert len(lines) == 1 and "is a directory" in lines[0]


def test_a_missing_folder_is_refused_before_anything_runs() -> None:
    with pytest.raises((OptionError, torch._dynamo.exc.BackendCompilerFailed), match="does not exist"):
        next(train(1, timeline="/tmp/no such folder/t.json"))


def test_a_step_that_an_exception_ended_is_not_shown() -> None:
    recorder = Recorder(100, 10)
    recorder.step.kernels.append(("k", 1, 2))
    recorder.mark_step_broken()
    recorder.end_step(3, training=True, planned=True)
    assert recorder.timeline(all_has_ended=True) is None
    recorder.step.kernels.append(("k", 1, 2))
    recorder.end_step(3, training=True, planned=True)
    line = recorder.timeline(all_has_ended=True)
    assert line is not None and [span.name for span in line.spans] == ["k"]


def test_plan_and_simulate_write_the_same_predicted_timeline(tmp_path: Path) -> None:
    paths = {name: str(tmp_path / f"{name}.json") for name in ("profile", "machine", "plan", "one", "other")}
    toys.diamond().write(paths["profile"])
    toys.machine().write(paths["machine"])
    where = (paths["profile"], "--machine", paths["machine"])
    assert main.main(["plan", *where, "-o", paths["plan"], "--timeline", paths["one"]]) == 0
    assert main.main(["simulate", paths["plan"], *where, "--timeline", paths["other"]]) == 0
    line = Timeline.read(paths["one"])
    assert line == Timeline.read(paths["other"])
    assert (line.kind, line.budget_bytes, line.step_ns) == ("predicted", 8, 12_000)
    assert {counter.kind for counter in line.counters} == {"activation", "workspace"}
    assert {span.track for span in line.spans} == {"compute", "evict:ssd", "fetch:ssd"}


@pytest.mark.parametrize("seed", range(8))
def test_timeline_bytes_equal_the_engines_count_at_any_moment(seed: int, tmp_path: Path) -> None:
    """Compare the bytes after each slot and each step.

    The steps are random, with random plans, on an asynchronous device.
    """
    run = engine_run.Run(seed, tmp_path)
    mover = run.engine.mover
    recorder = Recorder(run.engine.residency.budget_bytes, 0)
    run.engine.attach_recorder(recorder)
    assert not run.engine.residency.records, "the recorder missed records"
    wrong: list[int] = []
    counted = recorder._set_bytes_of_kind

    def count_and_compare(kind: str, size_bytes: int) -> None:
        counted(kind, size_bytes)
        if kind == "workspace" and not recorder.in_slot:
            recorded = sum(size for name, size in recorder.bytes.items() if name != "workspace")
            wrong.append(recorded - mover.resident_bytes)

    recorder._set_bytes_of_kind = count_and_compare  # type: ignore[method-assign]
    with contextlib.suppress(BudgetError):
        for _ in range(engine_run.STEPS):
            run.step()
            assert sum(size for _, size in recorder.resident.values()) == mover.resident_bytes
    assert len(wrong) > 10 and not any(wrong)
    line = recorder.timeline()
    assert line is None or line.spans


def test_layers_that_share_a_program_and_user_code_are_recorded(tmp_path: Path) -> None:
    """Compile blocks one by one, and read gradients in user code.

    User code that runs after a program counts as part of the program's `exit` kernel. The `exit` kernel
    therefore contains the fetches for these reads.
    """
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        layer.compile(
            backend="teraio",
            options={
                "inner": "eager",
                "memory": "14MiB",
                "warmup": 1,
                "planner": "greedy",
                "timeline": str(tmp_path / "t.json"),
            },
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        model(torch.randn(16, WIDTH)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.abs().max()
        optimizer.step()
        optimizer.zero_grad()
    calls = engine.ENGINE.tracker.programs if engine.ENGINE else []
    teraio.reset()
    line = Timeline.read(tmp_path / "t.json")
    kernels = [span for span in line.spans if span.track == "compute"]
    assert len([span for span in kernels if span.name == "exit"]) == len(calls) == 2 * LAYERS + 1
    assert all(one.end_ns <= other.start_ns for one, other in itertools.pairwise(kernels))
    own = {tick for tick, span in enumerate(kernels) if span.name == "exit"}
    gradients = [span for span in line.spans if span.tensor.endswith(".grad") and span.track == "fetch:ssd"]
    assert gradients, "no gradient was fetched, so the test is weak"
    within = [
        tick
        for span in gradients
        for tick in own
        if kernels[tick].start_ns <= span.start_ns <= kernels[tick].end_ns
    ]
    assert within
    assert all(stall.tick < len(kernels) for stall in line.stalls)


def test_moves_between_two_steps_are_recorded_at_the_start_of_the_next() -> None:
    """End a step at time 100, and fetch a weight from time 150 to time 160.

    The next step must begin with the weight resident.
    """
    recorder = Recorder(1_000, 10)
    recorder.step = RecordedStep(50, {})
    recorder.step.kernels.append(("k0", 60, 200))
    recorder.step.moves.append(RecordedMove("fetch:ssd", "w", 4, True, 150, 151, 160))
    recorder.step.stalls.append((160, Stall(0, "w", 10, "miss")))
    recorder.entered_ns = 200
    recorder.end_step(100, training=True, planned=True)
    recorder.step.kernels.append(("k1", 205, 240))
    first = recorder.timeline(all_has_ended=True)
    assert first is not None and first.step_ns == 50
    assert [(span.name, span.start_ns, span.end_ns) for span in first.spans] == [("k0", 10, 50)]
    assert first.stalls == ()
    recorder.end_step(230, training=True, planned=True)
    second = recorder.timeline(all_has_ended=True)
    assert second is not None
    assert second.dumps(), "the timeline can be written"
    assert [(span.name, span.start_ns, span.end_ns) for span in second.spans] == [("k1", 5, 30), ("w", 0, 0)]
    assert second.stalls == (Stall(0, "w", 10, "miss"),)


def test_a_recorder_ignores_tensors_that_it_has_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a recorder in the middle of a step, and record a step that does not end."""
    recorder = Recorder(100, 0)
    record: Any = SimpleNamespace(
        key=1, name="w", kind="weight", size_bytes=4, home="ssd", state=State.RESIDENT
    )
    recorder.subtract_resident_bytes(record)
    recorder.note_kind_change(record)
    recorder.note_move_end(record, None, 10**6)
    assert (recorder.bytes, recorder.step.stalls, recorder.step.moves) == ({}, [], [])
    recorder.add_resident_bytes(record)
    record.kind = "grad"
    recorder.note_kind_change(record)
    assert recorder.bytes == {"weight": 0, "grad": 4}
    monkeypatch.setattr("teraio.runtime.ledger.recorder.ENTRIES_MAX", 2)
    for number in range(4):
        recorder.note_slot_begin(0)
        recorder.note_kernel_begin(f"k{number}", 0)
    assert recorder.step.broken and len(recorder.step.kernels) < 4


def test_steps_after_an_exception_are_recorded_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    rows = nn.Embedding(2000, WIDTH)
    options: dict[str, Any] = {"inner": "eager", "memory": "12MiB", "warmup": 1, "timeline": str(path)}
    compiled: Any = torch.compile(rows, backend="teraio", options=options)
    optimizer = torch.optim.SGD(rows.parameters(), lr=0.1)
    refused = 0
    for index in (3, 4, 5, 10**6, 6, 7, 8):
        try:
            compiled(torch.tensor([index])).sum().backward()
        except IndexError:
            refused += 1
            continue
        optimizer.step()
        optimizer.zero_grad()
    teraio.reset()
    shown = [span.name for span in Timeline.read(path).spans if span.track == "compute"]
    assert refused == 1 and [name for name in shown if "SGD.step" in name]
