"""Who may run beside whom: tests share the machine with those of the other process, or have it alone."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Lanes:
    """Two locked files. All pass the gate; who wants to be alone keeps it shut until the others have left."""

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
        fcntl.flock(file, how)  # closing gives it back
        yield
