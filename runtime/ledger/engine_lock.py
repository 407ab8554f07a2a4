"""The engine's lock. Only one thread at a time works in the engine. Other threads wait without holding the
GIL."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import RLock
from typing import Any, TypeVar, cast


class EngineLock(type(RLock())):  # type: ignore[misc]
    """A reentrant lock that reports whether this thread holds it."""

    __slots__ = ()

    @property
    def is_held_by_this_thread(self) -> bool:
        """Return whether this thread already holds the lock."""
        return bool(self._is_owned())


Method = TypeVar("Method", bound=Callable[..., Any])


def hold_lock_during_method(method: Method) -> Method:
    """Wrap a method so that each call takes the lock of `self.engine`."""

    @functools.wraps(method)
    def call_under_lock(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.engine.lock:
            return method(self, *args, **kwargs)

    return cast(Method, call_under_lock)
