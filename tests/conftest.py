"""Every run: compiled programs and stores go to a folder of the run's own, and each suite's cost is measured.

The folder makes a run cost and do the same whether or not another one came before it. To keep Inductor's
cache between runs while working on one test, set TORCHINDUCTOR_CACHE_DIR.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator

import ledger
import pytest

SCRATCH = tempfile.mkdtemp(prefix="teraio-tests-")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(SCRATCH, "inductor"))
os.environ["XDG_CACHE_HOME"] = os.path.join(SCRATCH, "cache")
# Compiles run here and in children that are waited for, so that their CPU time is seen.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

SPENT: dict[str, ledger.Cost] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = ledger.now()
    try:
        return (yield)
    finally:
        suite = ledger.suite_of(item.path)
        SPENT[suite] = SPENT.get(suite, ledger.Cost()) + (ledger.now() - before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The ledger is closed last: what comes after that test is not in it."""
    items.sort(key=lambda item: item.name == "test_no_suite_outgrew_its_row")


@pytest.fixture
def spent() -> dict[str, ledger.Cost]:
    """What the suites that ran so far have cost."""
    return dict(SPENT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    budget = ledger.rows()
    for suite, cost in sorted(SPENT.items(), key=lambda entry: -entry[1].wall_s):
        row = f"{budget[suite]:.0f} s" if suite in budget else "none"
        terminalreporter.write_line(f"{suite:24} {cost.wall_s:7.1f} s, {cost.cpu_s:7.1f} s of CPU, row {row}")


def pytest_unconfigure() -> None:
    shutil.rmtree(SCRATCH, ignore_errors=True)
