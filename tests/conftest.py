"""Fixtures and hooks of all tests. Each run has its own folder for compiled programs and stores.

Because of its own folder, no run changes the cost or the result of another run. If you work on one test, set
TORCHINDUCTOR_CACHE_DIR, so that Inductor's cache is kept between your runs.

Tests run in two processes. All tests of one file run in the same process. `-n 0` runs all tests in one
process. A test that measures time has the mark `alone`. While a test with this mark runs, the other process
waits. Hooks measure the cost of each suite and compare the cost with the suite's row in budget.toml.
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
os.environ["TERAIO_CACHE_DIR"] = "off"  # without `off`, a test would find the plan of an earlier test
# The tests use the greedy planner, because the default planner always computes until its time limit. When two
# suites ran together, this trebled the cost of a suite. Tests of the default planner select the default
# planner explicitly.
os.environ.setdefault("TERAIO_PLANNER", "greedy")
# With one thread, Inductor compiles in this process, or in children that this process waits for. The CPU time
# of the compilation is therefore measured.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
LANES = Lanes(Path(os.environ.setdefault("TESTS_LANES", os.path.join(SCRATCH, "lanes"))))

SPENT: dict[str, ledger.Cost] = {}
FAST_SECONDS = 2.0  # seconds; the largest budget.toml row of a fast suite


def pytest_configure(config: pytest.Config) -> None:
    # In background jobs, shells ignore SIGINT, and Python then does not install its own handler.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "alone: measures time; nothing else runs beside it")
    config.addinivalue_line("markers", "long: a case that only a script of tests/long runs")
    config.addinivalue_line("markers", "fast: of a suite with a small row in budget.toml; set automatically")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder for stores. The folder is on a disk."""
    from store_rig import disk_near

    disk = disk_near(tmp_path)
    if disk is None:
        pytest.skip("no disk, only file systems in memory")
    return disk


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build a CUDA driver that needs no device, and return the path of its library."""
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
    """Replace torch by a fake and the driver by a fake driver. Tests of the CUDA device use both."""
    import fake_cuda

    with fake_cuda.installed(fake_driver, monkeypatch) as made:
        yield made


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Reset the engine and Dynamo after the test, so that the next test finds no engine and no compiled
    program.
    """
    yield
    import torch

    import teraio

    teraio.reset()
    torch._dynamo.reset()


@pytest.fixture
def one_thread(nothing_left: None) -> Iterator[None]:
    """Run torch with one thread, so that sums are bitwise equal in every run."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def steady_plans() -> Iterator[None]:
    """Let the engine make plans that do not depend on measured times."""
    import steady

    with steady.planned():
        yield


def _is_fast(path: Path) -> bool:
    return ledger.rows().get(ledger.suite_of(path), FAST_SECONDS + 1) <= FAST_SECONDS


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of slow test files under `-m fast`, because this import takes longer than all fast
    tests.
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
    """Sort test files by cost, the most expensive file first, so that both test processes end at about the
    same time.
    """
    rows = ledger.rows()
    items.sort(key=lambda item: -rows.get(ledger.suite_of(item.path), 0.0))


@pytest.hookimpl(optionalhook=True)  # xdist calls this hook, and may not be installed
def pytest_testnodedown(node: Any, error: object) -> None:
    """Add the suites' costs that an ended test process reports."""
    for suite, (wall_s, cpu_s) in getattr(node, "workeroutput", {}).get("spent", {}).items():
        SPENT[suite] = SPENT.get(suite, ledger.Cost()) + ledger.Cost(wall_s, cpu_s)


def outgrown(config: pytest.Config) -> list[str]:
    """Return a line for each suite that exceeds its row in budget.toml. The rows do not count cases marked
    `long`.
    """
    return ledger.complaints(ledger.rows(), SPENT) if config.option.markexpr != "long" else []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a suite exceeds its row in budget.toml. The summary names the suite."""
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
