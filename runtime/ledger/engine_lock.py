"""The lock of the engine: one thread at a time works in it, the others wait without the GIL."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import RLock
from typing import Any, TypeVar, cast


class EngineLock(type(RLock())):  # type: ignore[misc]
    """A lock that its thread may take again, and that knows which thread that is."""

    __slots__ = ()

    @property
    def is_held_by_this_thread(self) -> bool:
        """Whether this thread works in the engine already."""
        return bool(self._is_owned())


Method = TypeVar("Method", bound=Callable[..., Any])


def hold_lock_during_method(method: Method) -> Method:
    """Have this method of an object with an `engine` take the engine's lock."""

    @functools.wraps(method)
    def call_under_lock(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.engine.lock:
            return method(self, *args, **kwargs)

    return cast(Method, call_under_lock)
