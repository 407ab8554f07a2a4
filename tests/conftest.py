"""Every run: compiled programs and stores go to a folder of the run's own, and each suite's cost is measured.

The folder makes a run cost and do the same whether or not another one came before it. To keep Inductor's
cache between runs while working on one test, set TORCHINDUCTOR_CACHE_DIR.

Tests run in two processes, a file in one of them (`-n 0`: all in this one). Those that measure time are
marked `alone`: while one of them runs, the other process waits.
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
os.environ["TERAIO_CACHE_DIR"] = "off"  # or a test would find the plan of the one before it
# The default planner searches as long as it may: beside another suite that trebled what a suite cost. Tests
# of what it does name it.
os.environ.setdefault("TERAIO_PLANNER", "greedy")
# Compiles run here and in children that are waited for, so that their CPU time is seen.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
LANES = Lanes(Path(os.environ.setdefault("TESTS_LANES", os.path.join(SCRATCH, "lanes"))))

SPENT: dict[str, ledger.Cost] = {}
FAST_SECONDS = 2.0  # a suite whose row is no larger is fast


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background jobs
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "alone: measures time; nothing else runs beside it")
    config.addinivalue_line("markers", "long: a case that only a script of tests/long runs")
    config.addinivalue_line("markers", "fast: of a suite whose row in budget.toml is small; set by itself")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder for stores, on a disk."""
    from store_rig import disk_near

    disk = disk_near(tmp_path)
    if disk is None:
        pytest.skip("no disk here, only memory")
    return disk


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build a CUDA driver without a device; return the path of its library."""
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
    """Put a fake in place of torch and of the driver, for the CUDA device."""
    import fake_cuda

    with fake_cuda.installed(fake_driver, monkeypatch) as made:
        yield made


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Whatever the test compiled: no engine and no program of it are there for the next."""
    yield
    import torch

    import teraio

    teraio.reset()
    torch._dynamo.reset()


@pytest.fixture
def one_thread(nothing_left: None) -> Iterator[None]:
    """Sums come out the same, bit for bit."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def steady_plans() -> Iterator[None]:
    """What moves goes by no clock in this test."""
    import steady

    with steady.planned():
        yield


def _is_fast(path: Path) -> bool:
    return ledger.rows().get(ledger.suite_of(path), FAST_SECONDS + 1) <= FAST_SECONDS


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m fast` the other files are not even imported: that takes longer than the fast ones run."""
    others = config.option.markexpr == "fast" and collection_path.name.startswith("test_")
    return True if others and not _is_fast(collection_path) else None


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
    """The dearest files first: otherwise one process ends long before the other."""
    rows = ledger.rows()
    items.sort(key=lambda item: -rows.get(ledger.suite_of(item.path), 0.0))


@pytest.hookimpl(optionalhook=True)  # of xdist, which need not be there
def pytest_testnodedown(node: Any, error: object) -> None:
    """One of the processes has ended: what its suites have cost."""
    for suite, (wall_s, cpu_s) in getattr(node, "workeroutput", {}).get("spent", {}).items():
        SPENT[suite] = SPENT.get(suite, ledger.Cost()) + ledger.Cost(wall_s, cpu_s)


def outgrown(config: pytest.Config) -> list[str]:
    """Return a line for each suite that outgrew its row. Rows do not count the cases marked `long`."""
    return ledger.complaints(ledger.rows(), SPENT) if config.option.markexpr != "long" else []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run in which a suite outgrew its row fails; which one is in the summary."""
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
