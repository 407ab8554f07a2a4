"""The table of metrics, and the loggers that read figures when they are asked: Prometheus, OpenTelemetry."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from typing import Any, get_type_hints

import pytest
import torch
import tree
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import teraio
from teraio.integrations import metrics, opentelemetry, prometheus
from teraio.runtime.step.stats import Stats
from teraio.session import session

WIDTH, LAYERS = 128, 4

pytestmark = pytest.mark.usefixtures("nothing_left")


class Training:
    """A small training within a budget."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        options: dict[str, Any] = {"inner": "eager", "memory": "min", "warmup": 1, "planner": "greedy"}
        self.compiled = torch.compile(self.model, backend="teraio", options=options)

    def step(self) -> None:
        self.compiled(torch.randn(4, WIDTH)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_table_has_a_row_per_key_of_stats() -> None:
    keys = [metric.key for metric in metrics.METRICS]
    assert len(keys) == len({*keys})
    assert {*keys} - {metrics.PER_DAY} == {*get_type_hints(Stats)}


def test_page_of_reports_shows_the_table() -> None:
    """Compare the table with docs/reports.md. `metrics.table_for_docs()` returns the text of the page."""
    assert metrics.table_for_docs() in (tree.ROOT / "docs" / "reports.md").read_text()


def test_names_have_units_and_types_of_prometheus() -> None:
    names = [metric.prometheus_name for metric in metrics.METRICS]
    assert len({*names}) == len(names)
    for metric in metrics.METRICS:
        name = metric.prometheus_name
        assert re.fullmatch(r"teraio_[a-z_]+", name)
        assert name.endswith("_total") == (metric.kind == "counter")
        assert not re.search(r"_ns|total_bytes|_ms", name)
    assert {"teraio_step_seconds", "teraio_written_bytes_total", "teraio_steps_total"} <= {*names}


def test_values_are_in_base_units() -> None:
    stats = {"step_ns": 2_500_000_000, "step_written_bytes": 10, "phase": "planned", "steady": True}
    found = metrics.scalars(stats)
    assert found["teraio/step_seconds"] == 2.5
    assert found["teraio/written_per_day_bytes"] == 345_600
    assert found["teraio/phase"] == 1 and type(found["teraio/steady"]) is int
    assert metrics.brief_figures(stats, words=True)["teraio/phase"] == "planned"
    assert metrics.brief_figures(stats, words=False)["teraio/phase"] == 1


def test_figures_for_prometheus_and_opentelemetry_equal_the_stats(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint, Sum

    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    registry.register(prometheus.TeraioCollector())
    opentelemetry.observe(MeterProvider([reader]).get_meter("training"))
    assert prometheus.exposition() == "" and generate_latest(registry) == b""
    training = Training()
    for _ in range(3):
        training.step()
    stats: dict[str, Any] = {**teraio.stats()}
    # Transfers may still end between two calls. So each reader gets the same figures.
    monkeypatch.setattr(teraio, "stats", lambda: stats)
    by_text = {f.name: f for f in text_string_to_metric_families(prometheus.exposition())}
    by_package = {f.name: f for f in text_string_to_metric_families(generate_latest(registry).decode())}
    assert {n: (f.type, f.documentation, f.samples) for n, f in by_text.items()} == {
        n: (f.type, f.documentation, f.samples) for n, f in by_package.items()
    }
    written = by_text["teraio_written_bytes"]
    assert written.type == "counter" and written.samples[0].value == stats["written_bytes"] > 0
    phases = {s.labels["phase"]: s.value for s in by_text["teraio_phase"].samples}
    assert phases == {phase: phase == stats["phase"] for phase in metrics.PHASES}

    data = reader.get_metrics_data()
    assert data is not None
    found = {m.name: m for m in data.resource_metrics[0].scope_metrics[0].metrics}
    assert len(found) == len(by_text)
    for metric in metrics.METRICS:
        if metric.kind == "state" or metric.number_in(stats) is None:
            continue
        one = found[f"teraio.{metric.base}"]
        (point,) = one.data.data_points
        assert isinstance(point, NumberDataPoint) and point.value == metric.number_in(stats), metric.key
        assert isinstance(one.data, Sum) == (metric.kind == "counter")
        assert one.unit == {"seconds": "s", "bytes": "By"}.get(metric.unit, "1")


def test_instruments_of_one_collection_report_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(9))
    monkeypatch.setattr(opentelemetry.teraio, "stats", lambda: {"step": next(calls)})
    shared = opentelemetry.SharedStats()
    read = [shared.read(key)["step"] for key in ("a", "b", "a", "b", "b")]
    assert read == [0, 0, 1, 1, 2]


def test_stats_wait_for_no_lock() -> None:
    """Hold the engine's lock, as a slot does, and read the figures in another thread."""
    training = Training()
    training.step()
    assert session.SESSION is not None
    found: list[Stats] = []
    reader = threading.Thread(target=lambda: found.append(teraio.stats()), daemon=True)
    with session.SESSION.engine.lock:
        reader.start()
        reader.join(10)
        assert not reader.is_alive() and found[0]["step"] == 1


def test_freed_tensors_are_looked_for_only_with_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    training.step()
    assert session.SESSION is not None
    engine, held = session.SESSION.engine, []
    count = engine.residency.dead_resident_bytes

    def note_lock() -> int:
        held.append(engine.lock.is_held_by_this_thread)
        return count()

    monkeypatch.setattr(engine.residency, "dead_resident_bytes", note_lock)
    teraio.stats()
    assert held == [True]


def test_any_thread_reads_stats_at_any_time() -> None:
    """Read the figures in two threads all the time, through steps, resets and new sessions."""
    faults: list[BaseException] = []
    reads, ended = [0, 0], threading.Event()

    def read_all_the_time(number: int) -> None:
        while not ended.is_set():
            try:
                stats = teraio.stats()
                assert not stats or stats["step"] == 0 or stats["step_stall_ns"] <= stats["step_ns"], stats
                reads[number] += 1
            except BaseException as error:  # noqa: BLE001  any error is a fault
                faults.append(error)
                return
            time.sleep(0.0005)  # leave time to the training

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=read_all_the_time, args=(number,)) for number in range(2)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(2):
            training = Training()
            for _ in range(6):
                training.step()
            teraio.reset()
            torch._dynamo.reset()
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert not faults, faults
    assert min(reads) > 50


def test_no_package_is_imported_before_its_use() -> None:
    code = (
        "import sys, teraio.integrations.prometheus, teraio.integrations.opentelemetry, "
        "teraio.integrations.lightning, teraio.integrations.tensorboard, teraio.integrations.wandb;"
        "print(*[n for n in ('prometheus_client', 'opentelemetry', 'lightning', 'tensorboard', 'wandb') "
        "if n in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []
