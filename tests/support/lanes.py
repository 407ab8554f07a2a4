"""Locks for tests that share the machine with the other test process, and for tests that must run alone."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Lanes:
    """Two files used as locks: (1) the gate, which every test passes before it runs, and (2) the road, which
    a test occupies while it runs. A test that runs alone locks the gate and waits until the road is empty.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._gate, self._road = folder / "gate", folder / "road"

    @contextmanager
    def beside_others(self) -> Iterator[None]:
        with _locked(self._gate, fcntl.LOCK_EX):
            road = _locked(self._road, fcntl.LOCK_SH)
            road.__enter__()
        try:
            yield
        finally:
            road.__exit__(None, None, None)

    @contextmanager
    def alone(self) -> Iterator[None]:
        with _locked(self._gate, fcntl.LOCK_EX), _locked(self._road, fcntl.LOCK_EX):
            yield


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, how)  # closing the file releases the lock
        yield
