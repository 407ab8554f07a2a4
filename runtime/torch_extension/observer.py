"""The observer. It detects each read of an evicted tensor, below Python (`observer.cpp`). A block is a
storage that belongs to no tensor.

    evict     `empty_storage` frees the bytes or moves them to a block; the storage keeps its size but no
              pointer
    fetch     `make_empty_block` returns a block, which is filled while the storage still has no pointer;
              `give_block_to_storage` gives the block's bytes to the storage
    read      from the begin to the end of an operator, in any thread, the storages of its arguments are in
              use; `owner`, the engine, fetches the evicted arguments, with the GIL
    write     the observer detects a write by the operator's schema, or when code takes a mutable address

An attempt to copy or evict a storage in use raises `InUseError`. An attempt to evict a storage raises
`WrittenError` if the storage was written since its copy began.
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
from teraio.errors import TeraioError

from . import build

log = logging.getLogger("teraio")

SOURCE = Path(__file__).with_name("observer.cpp")
LIBRARIES = ("c10", "torch_cpu")
FAULT = b"a read of memory"  # the same text as kFault in observer_reads.h
SCALING = b"a scaling of a gradient"  # the same text as kScales in observer_reads.h
SCALINGS_OWED = 2  # the result of `teraio_arrive` that refuses bytes before their owed scalings have run
WRITTEN, POINTED = 2, 4  # the values of kWritten and kPointed in observer_known.h
LISTED_MOST = 2**16  # one call returns at most this many storages
STREAMS_MOST = 2**10

FETCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_char_p)


class NotEvicted(Exception):
    """The error for a storage that could not be evicted."""


class InUseError(NotEvicted):
    """The error for a storage that an operator uses, or whose address code outside of teraio has."""


class WrittenError(NotEvicted):
    """The error for a storage that was written since its copy began. The copy is stale."""


class Owner(Protocol):
    """The part of the engine that the observer calls when code reads evicted storages."""

    def fetch_for_reader(self, keys: Sequence[int], place: str) -> None:
        """Make the storages with these keys resident, because an operator or other code will read them.
        `place` names this code."""
        ...

    def end_evictions(self, keys: Sequence[int]) -> None:
        """End the evictions of these storages that are in flight, because code is about to scale the
        storages."""
        ...

    def note_failed_fetch(self, error: BaseException) -> None:
        """Record that a fetch failed with this error. The code that reads the tensor gets NaN instead of the
        tensor's values."""
        ...


class Observer:
    """The observer of this process. It detects reads of evicted tensors, and calls the engine to fetch
    them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.owner: Owner | None = None
        self._fetch = FETCH(self._fetch_or_refuse)  # this callback must live as long as C++ may call it
        self._found = (ctypes.c_void_p * LISTED_MOST)()
        self._streams = (ctypes.c_int64 * STREAMS_MOST)()
        self._tags: dict[str, int] = {}  # name of a gradient -> its tag in the tables of C++
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
            ("arrive", whole, pointer, pointer),
            ("gradient", None, pointer, whole),
            ("may_owe", None, pointer, flag),
            ("owed", whole, pointer),
            ("scale", ctypes.c_char_p, pointer, pointer, flag),
            ("is_asked", flag, pointer),
            ("answer", None, pointer, pointer),
            ("spared", None, ctypes.POINTER(ctypes.c_int64)),
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

    def report_to(self, owner: Owner | None) -> None:
        """Call this engine from now on when code reads evicted storages. If `owner` is None, such a read
        raises an error."""
        self.owner = owner

    def set_observing(self, on: bool) -> None:
        """Switch the observation of operators on or off. Benchmarks measure the cost of the observation by
        switching it off."""
        self.library.teraio_switch(on)

    @property
    def can_notice_taken_addresses(self) -> bool:
        """Return True if this version of torch reports when code takes a mutable address."""
        return bool(self.library.teraio_materializes())

    # ---- moves

    def watch_for_writes(self, storage: Any) -> None:
        """Start to detect writes into the storage. The caller has a valid copy of the storage's bytes in
        another tier."""
        self.begin_write_watch(storage)
        self.arm_write_watch(storage)

    def begin_write_watch(self, storage: Any) -> None:
        """Start to detect writes into the storage, while the caller copies its bytes. Raise InUseError if
        code uses the storage.

        Until `arm_write_watch` is called, this thread may take the storage's address for the copy. This does
        not count as a write.
        """
        if not self.library.teraio_copied(storage._cdata):
            raise InUseError

    def arm_write_watch(self, storage: Any) -> None:
        self.library.teraio_watch(storage._cdata)

    def empty_storage(self, storage: Any, unwritten: bool, block: Any = None) -> None:
        """Free the storage's bytes, or move them into the block. With `unwritten`, raise WrittenError if the
        storage was written since its copy began. Raise InUseError if code uses the storage."""
        into = None if block is None else block._cdata
        if (refused := self.library.teraio_leave(storage._cdata, into, unwritten)) != 0:
            raise InUseError if refused == 1 else WrittenError

    def make_empty_block(self, storage: Any) -> Any:
        """Return an empty storage on the device of `storage`. It has the allocator that torch uses for
        tensors."""
        block = torch.UntypedStorage(0, device=storage.device)
        if storage.device.type == "cpu":
            self.library.teraio_like_tensors(block._cdata)
        return block

    def give_block_to_storage(self, storage: Any, block: Any) -> bool:
        """Move the block's bytes into the storage.

        Return True if the block still has its bytes. There are two such cases: (1) the bytes were copied to
        an address at which other threads may read them, (2) the storage is already resident. The caller then
        frees the block.

        If scalings of the storage are owed, run them on the block first.
        """
        while (result := self.library.teraio_arrive(storage._cdata, block._cdata)) == SCALINGS_OWED:
            self.scale_block(storage, block, withheld=False)
        return bool(result)

    # ---- calls on evicted gradients that need no fetch

    def note_gradient(self, storage: Any, name: str) -> None:
        """Record that this storage has the gradient with this name. User code may from now on scale the
        gradient, and ask for its norm, while it is evicted."""
        self.library.teraio_gradient(storage._cdata, self._tags.setdefault(name, len(self._tags)))

    def set_may_owe(self, key: int, may: bool) -> None:
        """Set whether user code may scale this gradient while it is evicted."""
        self.library.teraio_may_owe(key, may)

    def owes_scalings(self, key: int) -> bool:
        """Return whether the bytes of this storage's copy still have to be scaled."""
        return bool(self.library.teraio_owed(key))

    def scale_block(self, storage: Any, block: Any, withheld: bool) -> None:
        """Run the owed scalings of this storage on the bytes of the block, which a fetch has read. If
        `withheld` is False, the storage then gets the block, and a later drop owes the scalings again."""
        if (failure := self.library.teraio_scale(storage._cdata, block._cdata, withheld)) is not None:
            raise TeraioError(f"a gradient could not be scaled after its fetch: {failure.decode()}")

    def is_asked(self, storage: Any) -> bool:
        """Return whether earlier steps have asked for a norm of the gradient in this storage."""
        return bool(self.library.teraio_is_asked(storage._cdata))

    def answer_from_block(self, storage: Any, block: Any) -> None:
        """Compute the norms that user code will ask of this evicted gradient. Take them from the block that
        has its bytes. The block's bytes are no longer the gradient's afterwards."""
        self.library.teraio_answer(storage._cdata, block._cdata)

    def spared_fetches(self) -> tuple[int, int]:
        """Return how often code has scaled an evicted gradient, and how often it has asked for a norm that
        was remembered. The counts begin with the process."""
        found = (ctypes.c_int64 * 2)()
        self.library.teraio_spared(found)
        return found[0], found[1]

    # ---- addresses

    def note_new_address(self, storage: Any) -> None:
        """Record that the storage's bytes have a new address, which no code outside of teraio has taken."""
        self.library.teraio_renewed(storage._cdata)

    def rearm_address_watch(self) -> None:
        """Detect again when code takes the address of a storage. The detection ends for a storage when a
        kernel takes its address."""
        self.library.teraio_rearm()

    def note_address_taken(self, key: int) -> None:
        """Record that code outside of teraio takes the address of this storage."""
        self.library.teraio_point(key)

    def forget_taken_addresses(self) -> None:
        """Forget which addresses code has taken. From now on, the observer assumes that no code has these
        addresses any more."""
        self.library.teraio_unpoint()

    def forget_storage(self, key: int, alive: bool) -> None:
        self.library.teraio_forget(key, alive)

    def is_written_since_copy(self, key: int) -> bool:
        """Return True if the storage was written since its copy began."""
        return bool(self.library.teraio_flags(key) & WRITTEN)

    def is_address_taken(self, key: int) -> bool:
        """Return True if code outside of teraio took the storage's address in this step."""
        return bool(self.library.teraio_flags(key) & POINTED)

    def some_are_evicted(self, tensors: Sequence[torch.Tensor]) -> bool:
        addresses = (ctypes.c_void_p * len(tensors))(*[tensor._cdata for tensor in tensors])
        return bool(self.library.teraio_some_evicted(addresses, len(tensors)))

    def storage_keys_in_use(self) -> list[int]:
        """Return the keys of the storages that operators use now, in any thread."""
        return self._read_storage_keys_from(self.library.teraio_used)

    def newly_touched_storage_keys(self) -> list[int]:
        """Return the keys of the storages that operators of user code have used since the last call of this
        method. Each key occurs once."""
        return self._read_storage_keys_from(self.library.teraio_touched)

    def newly_used_streams(self, device: int) -> list[int]:
        """Return the streams of this device on which operators have used evictable storages since the last
        call of this method.

        Operators within compiled programs are not counted.
        """
        count = self.library.teraio_streams(device, self._streams, STREAMS_MOST)
        return self._streams[:count]

    def _read_storage_keys_from(self, function: Any) -> list[int]:
        count = function(self._found, LISTED_MOST)
        return [key for key in self._found[:count] if key is not None]

    def change_program_depth(self, change: int) -> None:
        """Record that a compiled program begins (+1) or ends (-1) on this thread. The operators of the
        program do not count as user code."""
        self.library.teraio_program(change)

    @contextmanager
    def ignore_own_addresses(self) -> Iterator[None]:
        """Ignore the addresses of storages that this thread takes in the `with` block. The block reads no
        bytes at these addresses."""
        self.library.teraio_engine(1)
        try:
            yield
        finally:
            self.library.teraio_engine(-1)
            self.library.teraio_rearm()

    # ---- reads

    def _fetch_or_refuse(self, storages: Any, count: int, place: bytes) -> int:
        """Fetch the storages on the thread that reads them, with the GIL held. Return 0, or 1 if the fetch
        failed.

        If a storage is still evicted afterwards, a read of this storage raises an error.
        """
        keys = [storages[at] for at in range(count)]
        prior = set_eval_frame(None)  # otherwise Dynamo might compile this code with the reading code
        try:
            if self.owner is None:
                raise RuntimeError("no engine exists that could fetch it")
            if place == SCALING:
                self.owner.end_evictions(keys)
            else:
                self.owner.fetch_for_reader(keys, place.decode())
            return 0
        except BaseException as error:  # noqa: BLE001  the caller is C++
            if place == SCALING:  # the storages are resident, so the scaling can run
                return 1
            for key in keys:
                self.library.teraio_refuse(key, f"teraio: {error}".encode())
            if place == FAULT and self.owner is not None:
                self.owner.note_failed_fetch(error)
            return 1
        finally:
            set_eval_frame(prior)

    def _fetch_for_threads_unknown_to_python(self) -> None:
        """Fetch storages for threads that have no Python thread state. A thread of teraio runs this
        method."""
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
    """Return the observer of this process. If the observer's library cannot be built, log a warning and
    return None."""
    try:
        return Observer(build.build_and_load(SOURCE, LIBRARIES))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning(
            "teraio: weights, gradients and optimizer states are kept resident, because their readers cannot "
            "be observed; saved activations are still evicted (%s)",
            build.first_error_line(error),
        )
        return None
