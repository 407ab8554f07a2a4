"""Figures for OpenTelemetry. In: `teraio.stats()`, when a reader collects. Out: observable instruments.

    observe(opentelemetry.metrics.get_meter("training"))

An instrument's name has no unit: `teraio.step` has the unit `s`. A counter becomes an observable counter, any
other figure an observable gauge.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import teraio

from .metrics import METRICS, PHASES, Metric

# The units of OpenTelemetry (UCUM).
UNITS = {"seconds": "s", "bytes": "By", "ratio": "1", "": "1"}


class SharedStats:
    """The figures that all instruments of one collection report.

    An instrument that asks a second time begins a new collection.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stats: Mapping[str, Any] = {}
        self.readers: set[str] | None = None  # keys that have read `stats`; None before the first read

    def read(self, key: str) -> Mapping[str, Any]:
        with self.lock:
            if self.readers is None or key in self.readers:
                self.stats, self.readers = teraio.stats(), set()
            self.readers.add(key)
            return self.stats


def observe(meter: Any = None) -> None:
    """Make one observable instrument per figure. Without a meter, use one of the global provider. Figures
    that do not exist yet are not reported."""
    try:
        from opentelemetry.metrics import Observation, get_meter
    except ImportError as error:
        raise ImportError(
            f"teraio.integrations.opentelemetry needs OpenTelemetry ({error}): pip install opentelemetry-sdk"
        ) from error
    meter = get_meter("teraio", teraio.__version__) if meter is None else meter
    shared = SharedStats()
    for metric in METRICS:
        counter = metric.kind == "counter"
        make = meter.create_observable_counter if counter else meter.create_observable_gauge
        make(
            f"teraio.{metric.base}",
            callbacks=[_reader_of(metric, shared, Observation)],
            unit=UNITS[metric.unit],
            description=metric.help,
        )


def _reader_of(metric: Metric, shared: SharedStats, observation: Any) -> Callable[[Any], Iterable[Any]]:
    def read_metric(options: Any) -> list[Any]:
        value = metric.number_in(shared.read(metric.key))
        if value is None:
            return []
        if metric.kind == "state":
            return [observation(int(n == value), {metric.key: phase}) for n, phase in enumerate(PHASES)]
        return [observation(value)]

    return read_metric
