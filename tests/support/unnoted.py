"""Bugs to plant in the engine's records of writes, and in its transfers."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from teraio.runtime.torch_extension.observer import Observer


class Done:
    """A ticket that is always done."""

    _demand = False

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


def writes() -> list[Any]:
    """Return patches that hide writes by operators and writes by address from the engine. The engine then
    takes an old copy for a copy of the present bytes.
    """
    leave = Observer.empty_storage
    return [
        patch.object(Observer, "is_written_since_copy", lambda self, key: False),
        patch.object(Observer, "empty_storage", lambda self, storage, unwritten: leave(self, storage, False)),
    ]
