"""The key-value store of torch's process group, for short texts of teraio.

torchrun, or rank 0, serves the store. A rank reads and writes it without help of the other ranks. Reads check
the text like a text from a file, because another version of teraio may have written it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

TEXT_MAX_BYTES = 64 << 10
PREFIX = "teraio"
POLL_S = 0.01  # pause between two looks at the store
# Errors of the store: its server has ended, it does not answer in time, or it has no such key.
STORE_ERRORS = (RuntimeError, ValueError, OSError)


class RankStore:
    """Texts that the ranks of a process group publish for each other.

    Keys of one host begin with the host's name. A thread that reads while another thread uses this object has
    its own RankStore (`for_thread`).
    """

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks

    @staticmethod
    def of_process() -> RankStore | None:
        """Return the store of this process's group. Return None if the group has only one rank."""
        distributed = torch.distributed
        if not distributed.is_available() or not distributed.is_initialized():
            return None
        ranks = distributed.get_world_size()
        store = distributed.distributed_c10d._get_default_store()
        if ranks < 2:
            return None
        return RankStore(distributed.PrefixStore(PREFIX, store), distributed.get_rank(), ranks)

    def for_thread(self) -> RankStore:
        """Return a RankStore with a connection of its own, for another thread."""
        store = self.store
        with suppress(AttributeError, *STORE_ERRORS):
            store = store.clone()
        return RankStore(store, self.rank, self.ranks)

    def publish(self, key: str, text: str) -> None:
        """Publish a text under this key. A later text replaces an earlier one."""
        self.store.set(key, text)

    def publish_first(self, key: str, text: str) -> str:
        """Publish a text, unless a rank has already published one under this key. Return the published
        text."""
        return _checked_text(self.store.compare_set(key, "", text)) or text

    def read(self, key: str) -> str | None:
        """Return the text under this key. Return None if there is none, or if it is no text of teraio."""
        return _checked_text(self.store.get(key)) if self.store.check([key]) else None

    def remove(self, key: str) -> None:
        """Remove the text under this key."""
        self.store.delete_key(key)

    def wait_for(self, keys: Sequence[str], limit_s: float) -> bool:
        """Wait until all keys have texts. Return False if the time limit has passed before.

        The store's own wait would print a warning at the time limit, and would block other threads.
        """
        end = time.monotonic() + limit_s
        with suppress(*STORE_ERRORS):
            while not self.store.check(list(keys)):
                if time.monotonic() >= end:
                    return False
                time.sleep(POLL_S)
            return True
        return False


def _checked_text(value: bytes | str) -> str | None:
    """Return the value as text, or None if it is empty, too long, or no printable text."""
    if isinstance(value, str):
        value = value.encode()
    if not value or len(value) > TEXT_MAX_BYTES:
        return None
    with suppress(UnicodeDecodeError):
        text = value.decode()
        return text if all(c.isprintable() or c == "\n" for c in text) else None
    return None


def count_from_environment(name: str, default: int) -> int:
    """Return the number in a variable that torchrun sets, such as LOCAL_WORLD_SIZE."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 6 else default


def count_ranks() -> int:
    """Return the number of ranks of this training."""
    distributed = torch.distributed
    is_initialized = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_initialized else 1


def local_rank() -> int:
    """Return the number of this rank among the ranks of its host."""
    return count_from_environment("LOCAL_RANK", 0)


def local_ranks() -> int:
    """Return the number of ranks on this host."""
    return max(1, count_from_environment("LOCAL_WORLD_SIZE", 1))


def host_key(key: str) -> str:
    """Return the key of a text that only ranks of this host read.

    Hosts may have the same name, so the key also has torchrun's number of the host.
    """
    return f"{socket.gethostname()} {count_from_environment('GROUP_RANK', 0)}/{key}"
