"""The loggers that write each step: TensorBoard and Weights & Biases, offline, with the real packages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import teraio
from teraio.integrations.report_page import Report, RunFiles
from teraio.integrations.step_writer import StepWriter
from teraio.integrations.tensorboard import TensorBoardLogger
from teraio.integrations.wandb import WandbLogger

WIDTH, LAYERS, STEPS = 256, 4, 6

pytestmark = pytest.mark.usefixtures("nothing_left")


class Training:
    """A small training within a budget. A step has one optimizer, or two for halves of the weights."""

    def __init__(self, halves: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        weights = [*self.model.parameters()]
        parts = [weights[:LAYERS], weights[LAYERS:]] if halves else [weights]
        self.optimizers = [torch.optim.AdamW(part) for part in parts]
        wanted: dict[str, Any] = {
            "inner": "eager",
            "memory": "8MiB",
            "warmup": 1,
            "planner": "greedy",
            "planning": "inline",
        }
        self.compiled = torch.compile(self.model, backend="teraio", options={**wanted, **options})

    def step(self) -> None:
        self.compiled(torch.randn(16, WIDTH)).sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Rows(StepWriter):
    """A writer that keeps what it gets. It can fail at one step."""

    NAME = "Rows"

    def __init__(self, every: int = 1, fails_at: int = 0) -> None:
        self.rows: dict[int, Mapping[str, Any]] = {}
        self.fails_at, self.reports = fails_at, 0
        super().__init__(every)

    def write(self, step: int, figures: Mapping[str, int | float]) -> None:
        if step == self.fails_at:
            raise OSError("no space left")
        assert step not in self.rows
        self.rows[step] = figures

    def write_report(self, step: int, report: Report) -> None:
        self.reports += 1


@pytest.mark.parametrize("halves", [False, True])
def test_each_step_is_written_once_with_all_its_figures(halves: bool) -> None:
    training, last = Training(halves), []
    with Rows() as writer, Rows(every=2) as rare:
        for _ in range(4):
            training.step()
            last.append(teraio.stats())
        assert [*writer.rows] == [1, 2, 3]
    assert [*writer.rows] == [1, 2, 3, 4] and [*rare.rows] == [2, 4]
    assert [row["teraio/step_seconds"] for row in writer.rows.values()] == [s["step_ns"] / 1e9 for s in last]
    training.step()
    assert [*writer.rows] == [1, 2, 3, 4]  # a closed writer writes nothing


def test_failing_logger_is_reported_once_and_training_continues(caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    with Rows(fails_at=2) as writer:
        for _ in range(4):
            training.step()
    assert [*writer.rows] == [1] and teraio.stats()["step"] == 4
    lines = [line for line in caplog.messages if "Rows failed" in line]
    assert lines == ["teraio: Rows failed: OSError: no space left; no further steps are written to it"]


def test_missing_timeline_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert RunFiles().report() == ""
    path = tmp_path / "run.timeline.json"
    training = Training(timeline=str(path))
    with Rows() as writer:
        for _ in range(2):
            training.step()
        path.write_text("{")
    assert writer.reports == 0
    assert [
        line for line in caplog.messages if line.startswith("teraio: no report page: ") and str(path) in line
    ]


def test_tensorboard_and_wandb_have_scalars_of_each_step_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    settings = wandb.Settings(x_disable_stats=True, x_disable_meta=True, console="off")
    run = wandb.init(project="test", dir=str(tmp_path), settings=settings)
    logged: list[Any] = []
    monkeypatch.setattr(run, "log_artifact", logged.append)
    training, stats = Training(timeline=str(tmp_path / "run.timeline.json")), []
    with WandbLogger(), TensorBoardLogger(tmp_path / "board"):
        for number in range(STEPS):
            training.step()
            stats.append(teraio.stats())
            run.log({"loss": number})
    assert run.step == 2 * STEPS + 1  # a row per step, one of the user per step, and the report
    with WandbLogger(run, commit=False):
        training.step()
        training.step()
        run.log({"loss": 0})
    assert run.step == 2 * STEPS + 2
    summary, folder = dict(run.summary), Path(run.dir)
    run.finish()
    assert summary["teraio/steps"] == STEPS + 1  # the last step waits for one more row, or for finish()
    pages = [*(folder / "media" / "html" / "teraio").glob("report_*.html")]  # one per WandbLogger
    (in_board,) = (tmp_path / "board").glob("teraio-report.html")
    assert "<title>" in in_board.read_text() and in_board.read_text() in [p.read_text() for p in pages]
    assert "teraio-report.html" in logged[0].manifest.entries

    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    for name, key, scale in (("step_seconds", "step_ns", 1e-9), ("written_bytes", "written_bytes", 1)):
        points = events.Scalars(f"teraio/{name}")
        assert [point.step for point in points] == [*range(1, STEPS + 1)]
        expected = [row[key] * scale for row in stats]  # type: ignore[literal-required]
        assert [point.value for point in points] == pytest.approx(expected)
    text = events.Tensors("teraio/report/text_summary")[0].tensor_proto.string_val[0].decode()
    assert str(in_board) in text and "step" in text


def test_wandb_without_a_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setattr(wandb, "run", None)
    with pytest.raises(teraio.errors.OptionError, match=r"Call wandb.init\(\) first"):
        WandbLogger()


def test_steps_between_writes_are_at_least_one() -> None:
    with pytest.raises(ValueError, match="every is 0"):
        Rows(every=0)
