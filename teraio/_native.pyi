"""The native part. The transfer engine: tensors' bytes to files and back, through slabs, in the background.
The planner's simulator and search: arrays of integers in and out."""

from collections.abc import Sequence
from typing import Any, Literal

from numpy.typing import NDArray

Piece = tuple[int, int, int]
"""(file, offset, bytes): where a part of a tensor lies. Offsets are multiples of 4096; the extent is taken
up to the next multiple of 4096 behind its bytes. A tensor's pieces cover its bytes in order."""

FaultKind = Literal[
    "EIO", "ENOSPC", "short", "delay", "drop", "stall", "flip", "stale", "neighbour", "kill", "killed"
]

class QueueFull(RuntimeError):
    """`max_transfers` tickets are unfinished: wait for one, then submit again."""

class Slabs:
    """`count` buffers of `slab_bytes` (a multiple of 4096), 2 MiB aligned, on huge pages if there are any.
    With `address` they lie in memory that the caller owns and keeps alive. One Transfers per Slabs."""

    def __init__(self, slab_bytes: int, count: int, address: int = 0) -> None: ...
    @property
    def slab_bytes(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def quarantined(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def page_bytes(self) -> int:
        """The page size in effect: 2097152 or 4096."""

class Io:
    @property
    def files(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def buffered_files(self) -> int:
        """Files without O_DIRECT, from the start or since their first operation: they use the page cache."""
    @property
    def now_ns(self) -> int: ...

class ThreadIo(Io):
    """`threads` workers per file with pread and pwrite. `files`: (fd, path) pairs; the fds are duplicated."""

    def __init__(self, files: Sequence[tuple[int, str]], threads: int = 4) -> None: ...

class MemoryIo(Io):
    """Deterministic: files in memory, virtual time, everything runs on the thread that waits."""

    def __init__(
        self,
        files: int = 1,
        size_bytes: int = 67108864,
        depth: int = 4,
        latency_ns: int = 1000,
        ns_per_byte: float = 1.0,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> None: ...
    def peek(self, file: int, offset: int, size_bytes: int) -> bytes: ...
    def poke(self, file: int, offset: int, data: bytes) -> None: ...

class FaultIo(Io):
    """A shim around another engine; makes the n-th matching operation fail; `sticky`: all after it, too."""

    def __init__(self, inner: Io) -> None: ...
    def add(
        self,
        kind: FaultKind,
        op: Literal["read", "write", "any"] = "any",
        nth: int = 1,
        sticky: bool = False,
        file: int = -1,
        delay_s: float = 0.0,
        bit: int = -1,
        error: int = 0,
    ) -> None: ...
    def clear(self) -> None: ...
    def deliver(self) -> int:
        """Lets dropped operations happen and complete, late; how many."""
    def operations(self, op: Literal["read", "write", "any"] = "any") -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def dropped(self) -> int: ...

class Copier:
    """How bytes get between tensors and slabs; without one: tensors in RAM, copy and digest in one pass."""

class NoCopier(Copier):
    """Leaves tensors alone: measures drives and slabs. With `checksums=False`."""

    def __init__(self) -> None: ...

class CudaCopier(Copier):
    """Tensors in device memory. An `event` handle must have been recorded before the call that passes it: to
    wait for an unrecorded event is a silent no-op in CUDA. `context` 0: the current one."""

    def __init__(self, library: str = "libcuda.so.1", context: int = 0) -> None: ...
    def pin(self, slabs: Slabs) -> int:
        """Pins the arena for the life of this copier; the driver's error number, 0 if it is pinned."""

    def unpin(self, slabs: Slabs) -> int:
        """Ends that. No copy to or from the arena may be under way."""

    def stream(self, priority: int = 0) -> int:
        """Makes a stream that lives as long as this copier, and is nobody else's; returns its handle."""

    def give_to(self, stream: int, on_device: int, in_host: int, bytes: int, out: bool) -> int:
        """Gives a stream a copy between these addresses, `out` of the device or into it, and does not wait
        for it. Returns the driver's error number, 0 if the stream has it. The host memory must be pinned."""

class Transfers:
    """Submits never block and never wait for a disk; QueueFull at `max_transfers` unfinished tickets.
    `deadline_s` is per operation, from the moment the drive has it."""

    def __init__(
        self,
        io: Io,
        slabs: Slabs,
        *,
        checksums: bool = True,
        deadline_s: float = 60.0,
        max_transfers: int = 16384,
        write_retries: int = 1,
        read_retries: int = 2,
        copier: Copier | None = None,
    ) -> None: ...
    def out(
        self,
        address: int,
        size_bytes: int,
        pieces: Sequence[Piece],
        tag: int,
        generation: int,
        demand: bool = False,
        event: int = 0,
        deadline_s: float = 0.0,
    ) -> int:
        """Memory to files. The memory must stay alive and unchanged until the ticket is finished."""
    def into(
        self,
        address: int,
        size_bytes: int,
        pieces: Sequence[Piece],
        tag: int,
        generation: int,
        demand: bool = False,
        event: int = 0,
        deadline_s: float = 0.0,
    ) -> int:
        """Files to memory, with the pieces, tag and generation of the write. Not to be read earlier."""
    def done(self, ticket: int) -> bool:
        """Finished, well or badly; `wait` says which and then does not block."""
    def state(self, ticket: int) -> Literal["active", "done", "failed", "cancelled"]: ...
    def wait(self, ticket: int, name: str = "", keep: bool = False) -> bool:
        """True when the bytes have arrived, False if it was cancelled. Raises the StoreError of what failed,
        with kind, mismatch, errno, tag, generation, file, offset, bytes, retries, deadline_s. The ticket is
        released unless `keep`. A queued prefetch becomes a demand. Ctrl-C is heard; the ticket then stays."""
    def cancel(self, ticket: int) -> bool:
        """Drops what is queued; what runs, finishes. True: nothing had started. Still to be released."""
    def promote(self, ticket: int) -> bool:
        """From prefetch to demand. False: it was one already, or nothing of it is queued."""
    def release(self, ticket: int) -> None:
        """Forget the ticket; an unfinished transfer runs on, forgotten at its end (failures are counted)."""
    def times(self, ticket: int) -> tuple[int, int, int]:
        """(submitted, started, finished) in ns of time.monotonic_ns, 0 for what has not happened."""
    def forget(self, pieces: Sequence[Piece]) -> None:
        """These extents hold nothing any more; reading them is an error."""
    def lost(self) -> list[Piece]:
        """Extents that a write may still reach though its transfer timed out: never use them again."""
    def stats(self) -> dict[str, int | float]: ...
    def close(self, within_s: float = 5.0) -> bool:
        """Cancels what is queued, finishes what runs, joins the threads. False: something hangs."""

def close_all() -> None: ...
def digest(address: int, size_bytes: int) -> int: ...
def copy_digest(target: int, source: int, size_bytes: int) -> int: ...
def copy(target: int, source: int, size_bytes: int) -> None: ...

Integers = NDArray[Any]
"""int64, contiguous. Values out of range are a ValueError, times that add up to 2**62 an OverflowError."""

def settle(
    durations_ns: Integers, lanes: Integers, groups: Integers, transfers: Integers
) -> tuple[int, int, Integers]:
    """`lanes`: rows (bytes/s, latency, group or -1); `groups`: shared bytes/s; `transfers`: rows (lane, ns,
    bytes, issue tick, wait tick, is a fetch) in the order of the plan. Out: the period in ns, the steps that
    were run, and when each tick of the last one was entered."""

class Search:
    """Large-neighbourhood search. A row per gap: `gaps` (tensor, start, end, version or -1, age, bytes) and
    `absences` (away, out, free, trigger); per tensor: `lives` (first tick, end) and `routes` (-1: none).
    `held_bytes` by route and tick, `write_ns` and `read_ns` by gap and route. Raises for what is no plan."""

    def __init__(
        self,
        durations_ns: Integers,
        live_bytes: Integers,
        budget_bytes: int,
        gaps: Integers,
        lives: Integers,
        capacities_bytes: Integers,
        held_bytes: Integers,
        write_ns: Integers,
        read_ns: Integers,
        out_lanes: Integers,
        back_lanes: Integers,
        lanes: Integers,
        groups: Integers,
        absences: Integers,
        routes: Integers,
        seed: int,
    ) -> None: ...
    def run(self, rounds: int, until_ns: int, heat: float) -> int:
        """So many rounds, until `time.monotonic_ns()` is there (0: no matter), or until nothing stalls."""
    @property
    def best_ns(self) -> int: ...
    @property
    def evaluations(self) -> int: ...
    def best(self) -> Integers:
        """Four numbers per gap, as in `absences`, one after another."""
    def best_routes(self) -> Integers: ...

class SpareCounts:
    """Memory of tensors on a CPU: blocks in use, and what was freed and is kept."""

    @property
    def used_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int:
        """The most that was used since `reset_peak`."""
    @property
    def spare_bytes(self) -> int: ...
    @property
    def mapped_bytes(self) -> int:
        """Ever taken from the system."""
    @property
    def reused_bytes(self) -> int:
        """Ever taken from what was kept."""
    @property
    def gathered_bytes(self) -> int:
        """Of these: as pages of several blocks, moved to one address."""
    @property
    def moves(self) -> int: ...
    @property
    def limit_bytes(self) -> int: ...

class Spare:
    LEAST: int  # bytes; smaller blocks are malloc's

    def __init__(self) -> None: ...
    def take(self, size_bytes: int) -> int: ...
    def give(self, address: int) -> None: ...
    def vacate(self, address: int) -> int:
        """Its pages are kept, and its addresses stay without any; the caller unmaps so many bytes. 0: it is
        small, and stays a block."""
    def holds(self, address: int) -> bool:
        """Whether a block in use begins there, that is not malloc's."""
    def keep_within(self, size_bytes: int) -> None:
        """Used and kept bytes stay within this; what is used may exceed it, then nothing is kept."""
    def end_stretch(self) -> None:
        """What was kept all through this stretch and the one before goes back to the system."""
    def reset_peak(self) -> None: ...
    def counts(self) -> SpareCounts: ...

def spare() -> Spare:
    """The one that tensors of this process may come from."""

def spare_functions() -> tuple[int, int]:
    """Addresses of its `void* take(uint64_t bytes)` and `void give(void* block)`."""

def spare_vacate() -> int:
    """Address of its `uint64_t vacate(void* block)`."""
