"""Figures for Prometheus. In: `teraio.stats()`, when a server asks. Out: text in the exposition format, or
metrics of the package prometheus_client.

    prometheus_client.REGISTRY.register(TeraioCollector())
    prometheus_client.start_http_server(9000)

`exposition` needs no package. Any thread may call both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import teraio

from .metrics import METRICS, PHASES, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition() -> str:
    """Return all figures in Prometheus's text format. Before the first compile, the text is empty."""
    stats = teraio.stats()
    lines = []
    for metric in METRICS:
        samples = [*_samples(metric, stats)]
        if samples:
            kind = "counter" if metric.kind == "counter" else "gauge"
            name = metric.prometheus_name
            lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_labels_text(labels)} {value}" for labels, value in samples]
    return "".join(f"{line}\n" for line in lines)


class TeraioCollector:
    """A collector for a registry of prometheus_client."""

    def describe(self) -> list[Any]:
        """Return no metrics, so that a registry accepts the collector before the first compile."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats = teraio.stats()
        for metric in METRICS:
            samples = [*_samples(metric, stats)]
            if not samples:
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.prometheus_name, metric.help, labels=[*samples[0][0]])
            for labels, value in samples:
                family.add_metric([*labels.values()], value)
            yield family


def _samples(metric: Metric, stats: Any) -> Iterator[tuple[dict[str, str], int | float]]:
    """Yield the labels and values of a metric. A state has one sample per phase: 1 for the present one."""
    value = metric.number_in(stats)
    if value is None:
        return
    if metric.kind == "state":
        for number, phase in enumerate(PHASES):
            yield {metric.key: phase}, int(number == value)
    else:
        yield {}, value


def _labels_text(labels: dict[str, str]) -> str:
    """Return labels as in `{phase="planned"}`. No value has a character that needs an escape."""
    return "{" + ",".join(f'{name}="{text}"' for name, text in labels.items()) + "}" if labels else ""
