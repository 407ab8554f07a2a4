"""The engine's lock, because only one thread at a time may work in the engine. Other threads wait, and
release the GIL meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import RLock
from typing import Any, TypeVar, cast


class EngineLock(type(RLock())):  # type: ignore[misc]
    """A reentrant lock with a property that is True if the calling thread holds the lock."""

    __slots__ = ()

    @property
    def is_held_by_this_thread(self) -> bool:
        """Return whether the calling thread holds the lock."""
        return bool(self._is_owned())


Method = TypeVar("Method", bound=Callable[..., Any])


def hold_lock_during_method(method: Method) -> Method:
    """Wrap a method so that each call takes the lock of `self.engine`."""

    @functools.wraps(method)
    def call_under_lock(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.engine.lock:
            return method(self, *args, **kwargs)

    return cast(Method, call_under_lock)
