"""A run of planted bugs, one at a time, that the tests must find.

    python tests/long/planted.py [names] [--jobs 1] [--limit-s 900] [--work FOLDER] [--list]

For each patch of tests/data/planted, the script makes a copy of this tree with the bug in it and runs only
the tests that the patch names. Each named test must fail by an assertion, an error or the end of its process.
A hang counts as a failure only if the patch says so. A test that does not run does not count as a failure,
for example if its name does not exist or its module cannot be imported.

Before that, the same tests must pass without any bug. One folder holds the compiled csrc for all bugs, so
that only changed files are recompiled. `--work` keeps this folder. The script prints a line per bug, then
lines `name value target PASS|FAIL`. It exits with 1 if a line says FAIL.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import planted_bugs
import tree
from planted_bugs import Bug, Finder, PatchError
from says import exactly

from teraio import _native

MODULE = Path(_native.__file__)
# An error of these types means that the patch itself is broken, and that the test has not found the bug.
BROKEN = re.compile(r"\b(ImportError|ModuleNotFoundError|SyntaxError|IndentationError|NameError)\b")
PYTEST = ("-m", "pytest", "-n", "0", "-vv", "--tb=short", "-p", "no:cacheprovider")
NO_LIMIT_OF_ITS_OWN = ("-o", "faulthandler_timeout=0")
RUNNING: set[subprocess.Popen[bytes]] = set()
# Compiled files contain the paths of their sources, so the copy leaves them out.
COMPILED = shutil.ignore_patterns("__pycache__")


@dataclass(slots=True)
class Ran:
    """The outcome of a run of tests: the names of passed and failed tests as `file::name[case]`, and the
    printed output.
    """

    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    hung: bool = False
    crashed: bool = False  # True if the process died during one of the tests
    output: str = ""

    def of(self, finder: Finder, tests: Iterable[str]) -> list[str]:
        whole = finder.selector
        return [test for test in tests if test == whole or test.startswith((f"{whole}[", f"{whole}::"))]

    def misses(self, finder: Finder) -> str:
        """Return the reason for which this test has not found the bug, or an empty string if it has found the
        bug."""
        if self.crashed:
            return ""
        failed = self.of(finder, self.failed)
        if not failed:
            ended = "passes" if self.of(finder, self.passed) else f"did not run: {self.output[-600:]}"
            return f"{finder.selector} {ended}"
        broken = [found[0] for test in failed if (found := BROKEN.search(self.failed[test]))]
        if len(broken) == len(failed):
            return f"{finder.selector} ends with {broken[0]}: is the patch whole?"
        return ""


class Native:
    """The native module, which is compiled from csrc. Each copy of the tree gets a module with or without a
    bug."""

    def __init__(self, folder: Path) -> None:
        self.source, self.build = folder / "csrc", folder / "build"
        self.lock = threading.Lock()

    def put_into(self, copied: Copy) -> None:
        """Compile the sources of this copy. Only changed files are written again, so that the build skips the
        others.
        """
        with self.lock:
            for path in sorted((copied.root / "csrc").rglob("*")):
                target = self.source / path.relative_to(copied.root / "csrc")
                if path.is_file() and (not target.exists() or target.read_bytes() != path.read_bytes()):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(path.read_bytes())
            cmake = shutil.which("cmake") or str(Path(sys.executable).with_name("cmake"))
            if not (self.build / "CMakeCache.txt").exists():
                ninja = ["-G", "Ninja"] if shutil.which("ninja") else []
                python = f"-DPython_EXECUTABLE={sys.executable}"
                _quietly(cmake, "-S", str(self.source), "-B", str(self.build), python, *ninja)
            _quietly(cmake, "--build", str(self.build), "--parallel", str(os.cpu_count() or 1))
            shutil.copy2(self.build / MODULE.name, copied.module)


def _quietly(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PatchError(f"{' '.join(command[:2])} failed: {(done.stdout + done.stderr)[-1500:]}")


class Copy:
    """A copy of the tree with its own interpreter. The interpreter imports the package from the copy, and all
    other modules from the current environment.
    """

    def __init__(self, folder: Path, origin: Copy | None) -> None:
        self.folder = folder
        self.root, self.tmp = folder / "tree", folder / "tmp"
        self.tmp.mkdir(parents=True)
        if origin is not None:
            shutil.copytree(origin.root, self.root, symlinks=True, ignore=COMPILED)
        else:
            for path in tree.listed():
                (self.root / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree.ROOT / path, self.root / path, follow_symlinks=False)
            shutil.copy2(MODULE, self.module)
        venv.create(folder / "venv", symlinks=True, with_pip=False)
        self.python = folder / "venv" / "bin" / "python"
        site = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
        # The copy must be the first entry of sys.path, before an editable installation of this package.
        first = f"import sys; sys.path[0:0] = [{str(self.root)!r}]"
        others = [path for path in sys.path if _is_installed(Path(path))]
        (site / "planted.pth").write_text("\n".join([first, *others]) + "\n")

    @property
    def module(self) -> Path:
        return self.root / "teraio" / MODULE.name

    def run(self, selectors: Sequence[str], limit_s: float) -> Ran:
        """Run these tests in one process."""
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        command = [str(self.python), *PYTEST, *NO_LIMIT_OF_ITS_OWN, f"--junitxml={report}", *selectors]
        outside = {"PYTHONPATH", "VIRTUAL_ENV", "TESTS_LANES"}
        env = {key: value for key, value in os.environ.items() if key not in outside}
        ran = Ran()
        with open(self.folder / "output", "w+b") as output:
            running = subprocess.Popen(
                command,
                cwd=self.root,
                env={**env, "TMPDIR": str(self.tmp)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            RUNNING.add(running)
            try:
                running.wait(limit_s)
            except subprocess.TimeoutExpired:
                ran.hung = True
            finally:
                _end(running)
                RUNNING.discard(running)
            output.seek(0)
            ran.output = output.read().decode(errors="replace")
        begun = any(f"{selector.partition('::')[0]}::" in ran.output for selector in selectors)
        ran.crashed = running.returncode < 0 and not ran.hung and begun
        if report.exists():
            _read(report, ran)
        return ran

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_installed(path: Path) -> bool:
    """Return True if the path is outside of this tree, or in an environment inside of it."""
    return path.is_relative_to(sys.prefix) or not path.is_relative_to(tree.ROOT)


def _end(running: subprocess.Popen[bytes]) -> None:
    """Kill the process and its process group, because a test may have left a child that hangs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()


def _read(report: Path, ran: Ran) -> None:
    """Read the tests' outcomes. If a fixture raises an error or a module cannot be imported, the test has
    neither passed nor failed.
    """
    for case in ET.parse(report).iter("testcase"):
        test = f"{(case.get('classname') or '').replace('.', '/')}.py::{case.get('name')}"
        failures = case.findall("failure")
        if failures:
            ran.failed[test] = "".join(f"{each.get('message')}\n{each.text}" for each in failures)
        elif case.find("error") is None and case.find("skipped") is None:
            ran.passed.add(test)


class Bench:
    """Copies of the tree. The copy without a bug is made at the beginning, so that later changes of the tree
    have no effect.
    """

    def __init__(self, folder: Path, native: Native | None, limit_s: float) -> None:
        self.folder, self.native, self.limit_s = folder, native, limit_s
        self.sound = Copy(folder / "sound", None)
        # If no bug is in csrc, there is no native module, and the copy uses the installed one.
        if native is not None:
            native.put_into(self.sound)

    def fail_anyway(self, bugs: Sequence[Bug]) -> dict[str, str]:
        """Return the tests that do not pass without a bug, and the output of each."""
        finders = {finder.selector: finder for bug in bugs for finder in bug.tests}
        wrong = {}
        for file in sorted({finder.file for finder in finders.values()}):
            mine = [finder for finder in finders.values() if finder.file == file]
            began = time.monotonic()
            ran = self.sound.run([finder.selector for finder in mine], self.limit_s)
            for finder in mine:
                failed = ran.of(finder, ran.failed)
                if failed or not ran.of(finder, ran.passed):
                    wrong[finder.selector] = ran.failed[failed[0]] if failed else ran.output
            print(f"  without a bug: {file}, {len(mine)} named, {time.monotonic() - began:.0f} s", flush=True)
        return wrong

    def judge(self, bug: Bug, wrong: dict[str, str]) -> str:
        """Return the reason for which the tests do not find this bug, or an empty string if they find it."""
        for finder in bug.tests:
            if finder.selector in wrong:
                return f"{finder.selector} fails without the bug: {wrong[finder.selector][-600:]}"
        copied = Copy(self.folder / bug.name.partition("-")[0], self.sound)
        try:
            planted_bugs.plant(bug, copied.root)
            if bug.native and self.native is not None:
                self.native.put_into(copied)
            ran = copied.run([finder.selector for finder in bug.tests], self.limit_s)
        except PatchError as error:
            return str(error)
        finally:
            copied.remove()
        if ran.hung:
            return "" if bug.hangs else f"a test did not end within {self.limit_s:.0f} s"
        return "; ".join(filter(None, (ran.misses(finder) for finder in bug.tests)))


def chosen(names: Sequence[str]) -> list[Bug]:
    """Return the bugs with these names. Instead of a bug's full name, its number or the rest of its name is
    enough.

    If `names` is empty, return all bugs.
    """
    known = planted_bugs.bugs()
    parts = [(bug, bug.name.partition("-")) for bug in known]
    by_name = {name: bug for bug, (number, _, words) in parts for name in (bug.name, number, words)}
    if unknown := [name for name in names if name not in by_name]:
        raise SystemExit(f"unknown bugs: {', '.join(unknown)}; --list prints all")
    return [by_name[name] for name in names] or known


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="names of patches, or their numbers; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="bugs at a time")
    parser.add_argument("--limit-s", type=float, default=900, help="time limit of the tests of one bug")
    parser.add_argument("--work", type=Path, help="folder that keeps compiled files")
    parser.add_argument("--list", action="store_true", help="print all bugs, and run nothing")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    bugs = chosen(args.names)
    if args.list:
        for bug in bugs:
            print(f"{bug.name}: {bug.about}\n    {', '.join(finder.selector for finder in bug.tests)}")
        return 0
    with tempfile.TemporaryDirectory(prefix="teraio-planted-", ignore_cleanup_errors=True) as made:
        compiled = (args.work or Path(made)).resolve()
        native = Native(compiled) if any(bug.native for bug in bugs) else None
        bench = Bench(Path(made), native, args.limit_s)
        wrong = bench.fail_anyway(bugs)
        found = 0

        def judge(bug: Bug) -> tuple[Bug, str, float]:
            began = time.monotonic()
            return bug, bench.judge(bug, wrong), time.monotonic() - began

        pool = ThreadPoolExecutor(args.jobs)
        try:
            for bug, why, took_s in pool.map(judge, bugs):
                found += not why
                verdict = (
                    f"NOT FOUND: {why}" if why else f"found by {', '.join(f.selector for f in bug.tests)}"
                )
                print(f"  {bug.name}: {verdict}, {took_s:.0f} s", flush=True)
        finally:  # stop all running tests, also after Ctrl-C or SIGTERM
            pool.shutdown(wait=False, cancel_futures=True)
            for running in list(RUNNING):
                _end(running)
            pool.shutdown()
    return 0 if exactly("planted-bugs-found", found, len(bugs)) else 1


if __name__ == "__main__":
    sys.exit(main())
