"""The log lines of a run: their texts, their destination, and the ranks that write them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import toys
from torch import nn

import teraio
from teraio import progress
from teraio.errors import OptionError
from teraio.formats.plan import Evict, Fetch, Plan, Predicted
from teraio.formats.timeline import Timeline
from teraio.passes.inductor import codegen
from teraio.session import log_lines

DIAMOND_PLAN = Plan("", "hand", 8, (), (Evict("a", "ssd", 4, 1), Fetch("a", "ssd", 6, 9)))


@pytest.fixture
def plain_logger() -> Iterator[logging.Logger]:
    """Yield teraio's logger as it is in a program that has not configured logging: without handlers and
    level."""
    log, root = logging.getLogger("teraio"), logging.getLogger()
    before = log.handlers[:], log.filters[:], log.level, root.handlers[:]
    log.handlers[:], root.handlers[:] = [], []
    log.setLevel(logging.NOTSET)
    yield log
    log.handlers[:], log.filters[:], level, root.handlers[:] = before
    log.setLevel(level)


def test_plan_line_has_evicted_bytes_and_relative_step_time() -> None:
    """The step of `toys.diamond()` has a tensor `a` of 4 bytes and a tensor `b` of 6 bytes.

    Without moves, the step needs 10 bytes. The plan evicts `a` while `b` is resident.
    """
    plan = replace(DIAMOND_PLAN, predicted=Predicted(12_000, 11_000, 8))
    assert log_lines.describe_plan(plan, toys.diamond()) == (
        "planned by hand: up to 4 B of 10 B live on the SSD, 2 moves; a step of 12 µs, 1.20x of unlimited, "
        "9% above the bound"
    )
    assert log_lines.describe_plan(DIAMOND_PLAN, toys.diamond()).endswith("live on the SSD, 2 moves")
    fits = replace(DIAMOND_PLAN, moves=())
    assert (
        log_lines.describe_plan(fits, toys.diamond())
        == "planned by hand: the step fits into 8 B whole: nothing moves"
    )


def test_plan_line_names_all_tiers() -> None:
    moves = (*DIAMOND_PLAN.moves, Evict("b", "host", 7, 6))
    text = log_lines.describe_plan(replace(DIAMOND_PLAN, moves=moves), toys.diamond())
    assert "live on the host and the SSD" in text


def test_lines_go_to_stderr_unless_user_sets_up_logging(
    plain_logger: logging.Logger,
) -> None:
    logging.getLogger().handlers.clear()
    log_lines.set_up_logging({})
    assert len(plain_logger.handlers) == 1 and plain_logger.level == logging.INFO
    log_lines.set_up_logging({})
    assert len(plain_logger.handlers) == 1
    plain_logger.handlers.clear()
    plain_logger.setLevel(logging.NOTSET)
    # The handler on the root logger imitates a call of logging.basicConfig.
    logging.getLogger().addHandler(logging.NullHandler())
    log_lines.set_up_logging({})
    assert plain_logger.handlers == [] and plain_logger.level == logging.NOTSET


def test_log_level_follows_variable(plain_logger: logging.Logger) -> None:
    logging.getLogger().handlers.clear()
    log_lines.set_up_logging({"TERAIO_LOG": " Warning"})
    assert plain_logger.level == logging.WARNING
    log_lines.set_up_logging({"TERAIO_LOG": "debug"})
    assert plain_logger.level == logging.DEBUG and len(plain_logger.handlers) == 1
    log_lines.set_up_logging({"TERAIO_LOG": "off"})
    assert not plain_logger.isEnabledFor(logging.CRITICAL)
    with pytest.raises(OptionError, match="did you mean warning"):
        log_lines.set_up_logging({"TERAIO_LOG": "warnning"})


def test_other_ranks_log_only_warnings(plain_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    plain_logger.addHandler(Kept())
    plain_logger.setLevel(logging.DEBUG)
    log_lines.set_up_logging({})
    for rank in ("0", "1", "no number"):
        monkeypatch.setenv("RANK", rank)
        plain_logger.info("rank %s measures", rank)
        plain_logger.warning("rank %s is slow", rank)
    assert logged == [
        "rank 0 measures",
        *(f"rank {rank} is slow" for rank in ("0", "1")),
        "rank no number measures",
        "rank no number is slow",
    ]


def test_torch_trace_gets_profile_plan_and_timeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    found: dict[str, str] = {}

    def trace(name: str, metadata_fn: Any = dict, *, payload_fn: Any = str, **rest: Any) -> None:
        about = metadata_fn()
        if name == "artifact" and about["name"].startswith("teraio"):
            assert about["encoding"] == "json" and rest == {"expect_trace_id": False}
            found[about["name"]] = payload_fn()

    monkeypatch.setattr("torch._logging.trace_structured", trace)
    monkeypatch.setenv("TERAIO_CACHE_DIR", "off")
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = str(tmp_path / "t.json")
    options: dict[str, Any] = {
        "inner": "eager",
        "memory": "1GiB",
        "warmup": 1,
        "timeline": path,
    }
    compiled = torch.compile(model, backend="teraio", options=options)
    for _ in range(4):
        compiled(torch.randn(4, 128)).sum().backward()
        optimizer.step()
    teraio.reset()
    torch._dynamo.reset()
    assert {name: json.loads(text)["format"] for name, text in found.items()} == {
        "teraio_profile": "teraio-profile",
        "teraio_plan": "teraio-plan",
        "teraio_timeline": "teraio-timeline",
    }
    assert Timeline.loads(found["teraio_timeline"]) == Timeline.read(path)


class Mine(nn.Module):
    """A user's model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def test_progress_line_of_long_compile_names_function(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, nothing_left: None
) -> None:
    def slow(*args: Any, **kwargs: Any) -> Any:
        assert progress._LINE is not None
        progress._LINE.show_if_due()
        raise RuntimeError("it took too long")

    monkeypatch.setattr(codegen, "compile_fx_inner", slow)
    monkeypatch.setattr(progress, "is_quiet", lambda: False)
    monkeypatch.setattr(progress, "AFTER_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 60.0)
    caplog.set_level(logging.INFO, "teraio")
    compiled = torch.compile(Mine(), backend="teraio", options={"memory": "1GiB"})
    with pytest.raises(Exception, match="it took too long"):
        compiled(torch.randn(4, 16))
    (line,) = [text for text in caplog.messages if "compiling" in text]
    assert re.fullmatch(
        r"teraio: compiling Mine\.forward \(test_log_lines\.py:\d+\): compiling the forward program of \d "
        r"operators? with Inductor; \d s",
        line,
    ), line
    assert progress._LINE is None


def test_artifact_is_skipped_if_torch_trace_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._logging.trace_structured", lambda name: None)
    log_lines.add_trace_artifact("teraio_plan", DIAMOND_PLAN.dumps)


def test_debug_log_has_schedules_plan_and_changes_of_passes(
    one_thread: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256))
    options = teraio.Options(memory="7MiB", inner="eager", warmup=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compiled = torch.compile(model, backend="teraio", options=options)
    with caplog.at_level(logging.DEBUG, logger="teraio"):
        for _ in range(4):
            compiled(torch.ones(512, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    text = "\n".join(record.getMessage() for record in caplog.records if record.name == "teraio")
    assert re.search(r"pass recompute_cut: joint graph \w+ of \d+ nodes: 2 tensors are saved", text)
    assert re.search(r"pass slots: forward graph of \d+ nodes: 5 slots for 8 storages", text)
    assert re.search(r"schedule \w{16} of a backward program: \d+ slots, \d+ buffers\n +0  enter", text)
    assert re.search(r"\n +1  addmm  .*reads primals_1 \(256 KiB, argument\)", text)
    assert re.search(
        r"plan of greedy: \d+ moves in \d+ ticks\n +\d+  before \S+.*: (evict|fetch|drop|wait) ", text
    )
