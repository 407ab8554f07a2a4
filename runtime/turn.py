"""Whose turn it is: one thread at a time works in the engine, the others wait for it without the GIL."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast


class Turn:
    """A lock that its thread may take again, and that knows which thread that is."""

    __slots__ = ("_depth", "_lock", "_thread")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = 0
        self._depth = 0

    @property
    def is_ours(self) -> bool:
        """Whether this thread works in the engine already."""
        return self._thread == threading.get_ident()

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if self._thread != thread:
            self._lock.acquire()
            self._thread = thread
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._thread = 0
            self._lock.release()


Method = TypeVar("Method", bound=Callable[..., Any])


def in_turn(method: Method) -> Method:
    """Have this method of what has an `engine` wait for its turn."""

    @functools.wraps(method)
    def waits(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.engine.turn:
            return method(self, *args, **kwargs)

    return cast(Method, waits)
