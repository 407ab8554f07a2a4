"""Bugs to put into what the engine knows of writes and transfers."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from teraio.runtime.torch_extension.observer import Observer


class Done:
    """A ticket that says the bytes are there."""

    _demand = False

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


def writes() -> list[Any]:
    """What is written by operators and by address is taken for unchanged."""
    leave = Observer.empty_storage
    return [
        patch.object(Observer, "is_written_since_copy", lambda self, key: False),
        patch.object(Observer, "empty_storage", lambda self, storage, unwritten: leave(self, storage, False)),
    ]
