"""A timeline is what happened: its kernels are the step's, its waits are those of the counts, its bytes are
those of the ledger; and who asks for none pays for none."""

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
from teraio.session.planning import Planning

WIDTH = 512  # a weight is 1 MiB
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
    """Yields the number of each step that was taken."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wanted = {"inner": "eager", "memory": "15MiB", "warmup": 1, "planner": "greedy", **options}
    compiled = torch.compile(model, backend="teraio", options=wanted)
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
    """A run of six steps, the last four of them planned: its timeline, its profile, and what the last step
    added to the counts."""
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


def test_its_kernels_are_those_of_the_step_and_follow_each_other(ran: Ran) -> None:
    line, profile, _ = ran
    kernels = [span for span in line.spans if span.track == "compute"]
    assert line.kind == "measured"
    assert [span.name for span in kernels] == [kernel.name for kernel in profile.kernels]
    assert all(one.end_ns <= other.start_ns for one, other in itertools.pairwise(kernels))
    assert kernels[-1].end_ns == line.step_ns > 0


def test_every_transfer_of_the_step_is_in_it_with_its_tensor_and_bytes(ran: Ran) -> None:
    line, profile, added = ran
    sizes = {tensor.name: tensor.size_bytes for tensor in profile.tensors}
    tracks = Count(span.track for span in line.spans)
    assert set(tracks) <= {"compute", "evict:ssd", "fetch:ssd", "drop:ssd"}
    # Some of what happened between the two looks at the counts lies outside of the step, and the other way.
    assert abs(tracks["fetch:ssd"] - added["fetches"]) <= LAYERS
    assert added["fetches"] > LAYERS, "nothing moved: the test shows nothing"
    moved = [span for span in line.spans if span.track in {"evict:ssd", "fetch:ssd"}]
    assert all(span.name == span.tensor and span.bytes == sizes[span.tensor] for span in moved)
    assert all(0 <= span.start_ns <= span.end_ns for span in moved)


def test_its_waits_are_those_that_were_counted(ran: Ran) -> None:
    line, profile, added = ran
    assert {stall.cause for stall in line.stalls} <= {"late read", "link busy", "miss"}
    assert all(0 <= stall.tick < len(profile.kernels) for stall in line.stalls)
    told = sum(stall.ns for stall in line.stalls)
    counted = added["stall_ns"]
    assert told <= counted * 2 and counted <= told * 2 + 10_000 * (added["fetches"] + added["evictions"])


def test_its_counters_are_the_ledger_and_stay_within_the_budget(ran: Ran) -> None:
    """But for what user code hands over: it is there when a program begins, whose first slot makes room."""
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
    assert len(set(weights)) > 1, "weights never left"


def test_a_forgotten_end_is_noticed(ran: Ran, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The bug: what leaves is not told. Then the counters grow out of the budget."""
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


def test_it_is_there_while_the_run_goes_on(tmp_path: Path) -> None:
    """A planned step replaces a measured one at once, and a killed run leaves the last that was written."""
    path = tmp_path / "t.json"
    for step in train(6, timeline=str(path)):
        if step == 2:
            assert path.exists()
            before = path.read_bytes()
    assert path.read_bytes() != before


def test_the_time_a_plan_took_to_make_belongs_to_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, thought_s = Planning.choose_plan, 2.0

    def slow(self: Planning, profile: Profile, step: Step) -> Plan | None:
        time.sleep(thought_s)
        return make(self, profile, step)

    monkeypatch.setattr(Planning, "choose_plan", slow)
    monkeypatch.setenv("TERAIO_CACHE_DIR", "off")
    path = tmp_path / "run.timeline.json"
    began_s = time.perf_counter()
    list(train(3, timeline=str(path)))
    assert time.perf_counter() - began_s > thought_s
    teraio.reset()
    line = Timeline.read(path)
    assert 0 < line.step_ns < thought_s * 1e9
    assert line.spans[0].start_ns < 0.9 * thought_s * 1e9


def test_who_asks_for_none_pays_for_none() -> None:
    for _ in train(1):
        pass
    running = engine.ENGINE
    assert running is not None and running.mover.recorder is None
    assert "visit" not in vars(running) and not running.mover.store.space.keeps_times
    assert session.SESSION is not None and session.SESSION.recording is None


def test_a_place_that_cannot_be_written_is_said_and_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with caplog.at_level(logging.WARNING, "teraio"):
        for _ in train(4, timeline=str(path)):
            pass
        teraio.reset()
    said = [r.getMessage() for r in caplog.records if "timeline was not written" in r.getMessage()]
    assert len(said) == 1 and "is a directory" in said[0]


def test_a_folder_that_is_not_there_is_refused_before_anything_runs() -> None:
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


def test_the_commands_that_predict_write_one_of_the_same_type(tmp_path: Path) -> None:
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
def test_at_any_moment_its_bytes_are_those_that_the_engine_counts(seed: int, tmp_path: Path) -> None:
    """Random steps on an asynchronous device, with random plans: after each, and at each slot."""
    run = engine_run.Run(seed, tmp_path)
    mover = run.engine.mover
    recorder = Recorder(run.engine.residency.budget_bytes, 0)
    run.engine.attach_recorder(recorder)
    assert not run.engine.residency.records, "what is there already was missed"
    wrong: list[int] = []
    counted = recorder._set_bytes_of_kind

    def looked(kind: str, size_bytes: int) -> None:
        counted(kind, size_bytes)
        if kind == "workspace" and not recorder.in_slot:
            told = sum(size for name, size in recorder.bytes.items() if name != "workspace")
            wrong.append(told - mover.resident_bytes)

    recorder._set_bytes_of_kind = looked  # type: ignore[method-assign]
    with contextlib.suppress(BudgetError):
        for _ in range(engine_run.STEPS):
            run.step()
            assert sum(size for _, size in recorder.here.values()) == mover.resident_bytes
    assert len(wrong) > 10 and not any(wrong)
    line = recorder.timeline()
    assert line is None or line.spans


def test_layers_that_share_a_program_and_your_own_code_are_in_it(tmp_path: Path) -> None:
    """Blocks compiled one by one, gradients clipped in between: a fetch for the clipping is waited for in the
    last kernel of a program, which your own code belongs to."""
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
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
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
    assert gradients, "no gradient came back: the test shows nothing"
    within = [
        tick
        for span in gradients
        for tick in own
        if kernels[tick].start_ns <= span.start_ns <= kernels[tick].end_ns
    ]
    assert within
    assert all(stall.tick < len(kernels) for stall in line.stalls)


def test_what_your_own_code_does_between_two_steps_stands_at_the_begin_of_the_next() -> None:
    """A step ends at 100. What is fetched at 150, and has come at 160, is there when the next begins."""
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
    assert second.dumps(), "it can be written"
    assert [(span.name, span.start_ns, span.end_ns) for span in second.spans] == [("k1", 5, 30), ("w", 0, 0)]
    assert second.stalls == (Stall(0, "w", 10, "miss"),)


def test_what_a_recorder_has_not_met_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may begin in the middle of a step, and a step may never end."""
    recorder = Recorder(100, 0)
    record: Any = SimpleNamespace(
        key=1, name="w", kind="weight", size_bytes=4, home="ssd", state=State.DEVICE
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


def test_after_an_exception_in_a_program_whole_steps_follow(tmp_path: Path) -> None:
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
