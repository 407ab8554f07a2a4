"""Fixtures and hooks of all tests.

Each test run has its own folder for compiled programs and stores. So no run changes the cost or result of
another. If you work on one test, set TORCHINDUCTOR_CACHE_DIR to keep Inductor's cache between your runs.

Tests run in two processes, and all tests of one file run in one process. `-n 0` runs all tests in a single
process. A test with the mark `alone` measures time. While it runs, the other process waits. Hooks measure the
cost of each suite and compare it with the suite's row in budget.toml.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import ledger
import pytest
from lanes import Lanes

SCRATCH = tempfile.mkdtemp(prefix="teraio-tests-")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(SCRATCH, "inductor"))
os.environ["XDG_CACHE_HOME"] = os.path.join(SCRATCH, "cache")
os.environ["TERAIO_CACHE_DIR"] = "off"  # otherwise a test would use the plan of an earlier test
# The tests use the planner `greedy`, because the default planner computes until its time limit. Two suites
# that ran at the same time therefore cost three times as much. Tests of the default planner select it
# explicitly.
os.environ.setdefault("TERAIO_PLANNER", "greedy")
# With `inline`, the same step is the first step with a plan on each machine. Tests of the planner's own
# process set the option `planning` to `process`.
os.environ.setdefault("TERAIO_PLANNING", "inline")
# With one compile thread, Inductor compiles in this process, or in child processes for which this process
# waits. So the measured CPU time contains the compilation.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
LANES = Lanes(Path(os.environ.setdefault("TESTS_LANES", os.path.join(SCRATCH, "lanes"))))

SPENT: dict[str, ledger.Cost] = {}
FAST_SECONDS = 2.0  # a suite is fast if its row in budget.toml is at most this number of seconds


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with SIGINT ignored. Python then does not install its own handler, which
    # raises KeyboardInterrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "alone: measures time; nothing else runs beside it")
    config.addinivalue_line("markers", "long: a case that only a script of tests/long runs")
    config.addinivalue_line("markers", "fast: of a suite with a small row in budget.toml; set automatically")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder for stores that is on a real disk. Skip the test if there is no disk."""
    from store_rig import disk_near

    disk = disk_near(tmp_path)
    if disk is None:
        pytest.skip("no disk, only file systems in memory")
    return disk


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compile a fake CUDA driver that needs no GPU. Return the path of its library."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to build the fake driver with")
    target = tmp_path_factory.mktemp("fake") / "libcuda_fake.so"
    source = Path(__file__).parent / "native" / "fake_cuda.cpp"
    subprocess.run(
        [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", source, "-o", target], check=True
    )
    return str(target)


@pytest.fixture
def fake(fake_driver: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Replace torch by a fake torch, and the CUDA driver by a fake driver, for tests of the CUDA device."""
    import fake_cuda

    with fake_cuda.installed(fake_driver, monkeypatch) as made:
        yield made


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Reset the engine and Dynamo after the test.

    The next test then finds no engine and no compiled programs.
    """
    yield
    import torch

    import teraio

    teraio.reset()
    torch._dynamo.reset()


@pytest.fixture
def one_thread(nothing_left: None) -> Iterator[None]:
    """Let torch use one thread, so that sums are equal in every run, bit for bit."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def steady_plans() -> Iterator[None]:
    """Let the engine make plans that do not depend on measured times, so that each run makes the same
    plans.
    """
    import steady

    with steady.planned():
        yield


def _is_fast(path: Path) -> bool:
    return ledger.rows().get(ledger.suite_of(path), FAST_SECONDS + 1) <= FAST_SECONDS


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import slow test files if only fast tests are selected (`-m fast`).

    The imports alone would take longer than all fast tests.
    """
    only_fast = config.option.markexpr == "fast" and collection_path.name.startswith("test_")
    return True if only_fast and not _is_fast(collection_path) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    if _is_fast(item.path) and item.get_closest_marker("long") is None:
        item.add_marker("fast")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with LANES.alone() if item.get_closest_marker("alone") else LANES.beside_others():
        before = ledger.now()
        try:
            return (yield)
        finally:
            suite = ledger.suite_of(item.path)
            SPENT[suite] = SPENT.get(suite, ledger.Cost()) + (ledger.now() - before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort test files by cost, with the most expensive file first.

    Then the two test processes end at about the same time.
    """
    rows = ledger.rows()
    items.sort(key=lambda item: -rows.get(ledger.suite_of(item.path), 0.0))


@pytest.hookimpl(optionalhook=True)  # only the plugin xdist has this hook, and it may be missing
def pytest_testnodedown(node: Any, error: object) -> None:
    """Add the costs that an ending test process reports to the costs of the suites."""
    for suite, (wall_s, cpu_s) in getattr(node, "workeroutput", {}).get("spent", {}).items():
        SPENT[suite] = SPENT.get(suite, ledger.Cost()) + ledger.Cost(wall_s, cpu_s)


def outgrown(config: pytest.Config) -> list[str]:
    """Return a complaint for each suite that costs more than its row in budget.toml allows.

    Cases marked `long` are not in these rows. If only such cases run, return no complaint.
    """
    return ledger.complaints(ledger.rows(), SPENT) if config.option.markexpr != "long" else []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let the run fail if a suite costs more than its row in budget.toml allows. The summary names the
    suite.
    """
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["spent"] = {suite: (cost.wall_s, cost.cpu_s) for suite, cost in SPENT.items()}
    elif session.exitstatus == pytest.ExitCode.OK and outgrown(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    budget = ledger.rows()
    for suite, cost in sorted(SPENT.items(), key=lambda entry: -entry[1].wall_s):
        row = f"{budget[suite]:g} s" if suite in budget else "none"
        terminalreporter.write_line(f"{suite:24} {cost.wall_s:7.1f} s, {cost.cpu_s:7.1f} s of CPU, row {row}")
    for line in outgrown(terminalreporter.config):
        terminalreporter.write_line(line, red=True)


def pytest_unconfigure() -> None:
    shutil.rmtree(SCRATCH, ignore_errors=True)
