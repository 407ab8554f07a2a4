"""The observer: sees every read of an evicted tensor from below Python (`observer.cpp`), and has it fetched.

    evict     `empty_storage`: the bytes are freed, or go to a block; the storage keeps its size, not its
              pointer
    fetch     `make_empty_block`: fresh memory, filled while the storage still has no pointer
              `give_block_to_storage`: the storage has these bytes from now on
    read      an operator begins, in any thread: the storages of its arguments are in use until it ends, and
              those that are evicted are fetched by `owner`, with the GIL
    write     noted by what operators say of their arguments, and by who takes a mutable address

A storage that someone uses is neither evicted nor copied: `InUseError`. One that was written since its copy
began is not emptied: `WrittenError`.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._C._dynamo.eval_frame import set_eval_frame

from teraio import _native

from . import build

log = logging.getLogger("teraio")

SOURCE = Path(__file__).with_name("observer.cpp")
LIBRARIES = ("c10", "torch_cpu")
FAULT = b"a read of memory"  # as in observer.cpp
WRITTEN, POINTED = 2, 4  # as in observer.cpp
LISTED_MOST = 2**16  # storages that one question is answered with
STREAMS_MOST = 2**10

FETCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_char_p)


class NotEvicted(Exception):
    """A storage stays as it is."""


class InUseError(NotEvicted):
    """An operator uses the storage, or someone has its address."""


class WrittenError(NotEvicted):
    """Someone wrote into the storage since its copy began."""


class Owner(Protocol):
    """The engine, as the observer needs it."""

    def fetch_for_reader(self, keys: Sequence[int], place: str) -> None:
        """Make these storages resident: an operator, or whoever asks for an address, is about to use them."""
        ...

    def note_failed_fetch(self, error: BaseException) -> None:
        """Someone reads memory whose bytes could not be fetched, and finds NaN."""
        ...


class Observer:
    """The one of this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.owner: Owner | None = None
        self._fetch = FETCH(self._fetch_or_refuse)  # as long as C++ may call it
        self._found = (ctypes.c_void_p * LISTED_MOST)()
        self._streams = (ctypes.c_int64 * STREAMS_MOST)()
        self._declare_c_functions()
        state = ctypes.cast(ctypes.pythonapi.PyGILState_GetThisThreadState, ctypes.c_void_p)
        library.teraio_blocks(_native.spare_functions()[1], _native.spare_vacate())
        library.teraio_observe(self._fetch, state)
        threading.Thread(
            target=self._fetch_for_threads_unknown_to_python, name="teraio-fetches", daemon=True
        ).start()
        atexit.register(library.teraio_end)

    def _declare_c_functions(self) -> None:
        pointer, flag, whole = ctypes.c_void_p, ctypes.c_bool, ctypes.c_int
        addresses = ctypes.POINTER(ctypes.c_void_p)
        for name, result, *arguments in (
            ("observe", None, FETCH, pointer),
            ("blocks", None, pointer, pointer),
            ("copied", flag, pointer),
            ("leave", whole, pointer, pointer, flag),
            ("arrive", flag, pointer, pointer),
            ("forget", None, pointer, flag),
            ("flags", whole, pointer),
            ("renewed", None, pointer),
            ("like_tensors", None, pointer),
            ("point", None, pointer),
            ("unpoint", None),
            ("some_evicted", flag, addresses, whole),
            ("used", whole, addresses, whole),
            ("touched", whole, addresses, whole),
            ("streams", whole, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), whole),
            ("watch", None, pointer),
            ("program", None, whole),
            ("engine", None, whole),
            ("rearm", None),
            ("refuse", None, pointer, ctypes.c_char_p),
            ("serve", pointer),
            (
                "take",
                flag,
                pointer,
                ctypes.POINTER(addresses),
                ctypes.POINTER(whole),
                ctypes.POINTER(ctypes.c_char_p),
            ),
            ("served", None, pointer),
            ("materializes", flag),
            ("switch", None, flag),
            ("patience", None, ctypes.c_int64),
            ("end", None),
        ):
            function = getattr(self.library, f"teraio_{name}")
            function.restype, function.argtypes = result, arguments

    def set_observing(self, on: bool) -> None:
        """Switch it off, to measure what it costs; nothing is seen meanwhile."""
        self.library.teraio_switch(on)

    @property
    def can_notice_taken_addresses(self) -> bool:
        """Whether this torch tells when a mutable address is taken."""
        return bool(self.library.teraio_materializes())

    # ---- moves

    def watch_for_writes(self, storage: Any) -> None:
        """Note who writes into it from now on: it has a copy that is good."""
        self.begin_write_watch(storage)
        self.arm_write_watch(storage)

    def begin_write_watch(self, storage: Any) -> None:
        """Note who writes into it from now on. This thread asks for its address to copy it, until
        `arm_write_watch`."""
        if not self.library.teraio_copied(storage._cdata):
            raise InUseError

    def arm_write_watch(self, storage: Any) -> None:
        self.library.teraio_watch(storage._cdata)

    def empty_storage(self, storage: Any, unwritten: bool, block: Any = None) -> None:
        """Free its bytes, or move them into this block."""
        into = None if block is None else block._cdata
        if (refused := self.library.teraio_leave(storage._cdata, into, unwritten)) != 0:
            raise InUseError if refused == 1 else WrittenError

    def make_empty_block(self, storage: Any) -> Any:
        """Return an empty storage on the same device, whose bytes come from where tensors' bytes do."""
        block = torch.UntypedStorage(0, device=storage.device)
        if storage.device.type == "cpu":
            self.library.teraio_like_tensors(block._cdata)
        return block

    def give_block_to_storage(self, storage: Any, block: Any) -> bool:
        """The bytes of the block are the storage's from now on. Return whether it has a copy of them, at an
        address that someone has, and the block is to be freed."""
        return bool(self.library.teraio_arrive(storage._cdata, block._cdata))

    def note_new_address(self, storage: Any) -> None:
        """Its bytes are at another address, and nobody has the old one."""
        self.library.teraio_renewed(storage._cdata)

    def rearm_address_watch(self) -> None:
        """See who takes an address again, where kernels took it meanwhile."""
        self.library.teraio_rearm()

    def note_address_taken(self, key: int) -> None:
        """Someone takes the address of this storage."""
        self.library.teraio_point(key)

    def forget_taken_addresses(self) -> None:
        """Take it that nobody has an address any more that he asked for."""
        self.library.teraio_unpoint()

    def forget_storage(self, key: int, alive: bool) -> None:
        self.library.teraio_forget(key, alive)

    def is_written_since_copy(self, key: int) -> bool:
        """Whether someone wrote into it since it was copied."""
        return bool(self.library.teraio_flags(key) & WRITTEN)

    def is_address_taken(self, key: int) -> bool:
        """Whether someone has taken its address in this step."""
        return bool(self.library.teraio_flags(key) & POINTED)

    def some_are_evicted(self, tensors: Sequence[torch.Tensor]) -> bool:
        addresses = (ctypes.c_void_p * len(tensors))(*[tensor._cdata for tensor in tensors])
        return bool(self.library.teraio_some_evicted(addresses, len(tensors)))

    def storage_keys_in_use(self) -> list[int]:
        """Return what operators use now, in any thread."""
        return self._read_storage_keys_from(self.library.teraio_used)

    def newly_touched_storage_keys(self) -> list[int]:
        """Return what operators have used since the last call, each once."""
        return self._read_storage_keys_from(self.library.teraio_touched)

    def newly_used_streams(self, device: int) -> list[int]:
        """Return on which streams of this device operators out of programs have used what can be evicted,
        since the last call."""
        count = self.library.teraio_streams(device, self._streams, STREAMS_MOST)
        return self._streams[:count]

    def _read_storage_keys_from(self, function: Any) -> list[int]:
        count = function(self._found, LISTED_MOST)
        return [key for key in self._found[:count] if key is not None]

    def change_program_depth(self, change: int) -> None:
        """Begin (+1) or end (-1) a stretch in which what this thread uses is no touch of user code's."""
        self.library.teraio_program(change)

    @contextmanager
    def ignore_own_addresses(self) -> Iterator[None]:
        """In the block this thread asks for addresses and reads nothing."""
        self.library.teraio_engine(1)
        try:
            yield
        finally:
            self.library.teraio_engine(-1)
            self.library.teraio_rearm()

    # ---- reads

    def _fetch_or_refuse(self, storages: Any, count: int, place: bytes) -> int:
        """In the thread of whoever reads, with the GIL. What is not resident afterwards cannot be read."""
        keys = [storages[at] for at in range(count)]
        prior = set_eval_frame(None)  # Dynamo runs the frame that reads, and would compile us
        try:
            if self.owner is None:
                raise RuntimeError("no engine is there to fetch it")
            self.owner.fetch_for_reader(keys, place.decode())
            return 0
        except BaseException as error:  # noqa: BLE001  C++ called this
            for key in keys:
                self.library.teraio_refuse(key, f"teraio: {error}".encode())
            if place == FAULT and self.owner is not None:
                self.owner.note_failed_fetch(error)
            return 1
        finally:
            set_eval_frame(prior)

    def _fetch_for_threads_unknown_to_python(self) -> None:
        """A thread: fetches for threads that Python does not know."""
        library = self.library
        storages, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_int()
        place = ctypes.c_char_p()
        while (request := library.teraio_serve()) is not None:
            if library.teraio_take(request, *map(ctypes.byref, (storages, count, place))):
                try:
                    self._fetch_or_refuse(storages, count.value, place.value or b"")
                finally:
                    library.teraio_served(request)


@cache
def observer_of_process() -> Observer | None:
    """The one of this process; None if it cannot be built, which is said."""
    try:
        return Observer(build.build_and_load(SOURCE, LIBRARIES))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning(
            "teraio: weights, gradients and optimizer states stay in memory, because nobody would see who "
            "reads them; what forwards save is evicted (%s)",
            build.first_error_line(error),
        )
        return None
