"""The native part of teraio.

The transfer engine moves bytes between tensors and files in the background, through slabs (buffers). The
planner's simulator and search take and return arrays of integers.
"""

from collections.abc import Sequence
from typing import Any, Literal

from numpy.typing import NDArray

Piece = tuple[int, int, int]
"""(file, offset, bytes): the extent of a part of a tensor in a file. Offsets are multiples of 4096. The
extent ends at the next multiple of 4096 after its bytes. The pieces of a tensor cover the tensor's bytes in
order."""

FaultKind = Literal[
    "EIO", "ENOSPC", "short", "delay", "drop", "stall", "flip", "stale", "neighbour", "kill", "killed"
]

class QueueFull(RuntimeError):
    """The error for a new transfer while `max_transfers` tickets are unfinished.

    Wait for one of the tickets, and then submit the transfer again.
    """

class Slabs:
    """An arena of `count` buffers for one Transfers object. Each buffer has `slab_bytes`, a multiple of 4096.

    The arena is aligned to 2 MiB, and uses huge pages if the kernel has any. With `address`, the arena uses
    memory that the caller owns and keeps allocated.
    """

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
        """Return the page size in effect: 2097152 or 4096."""

class Io:
    """An I/O engine, which runs single reads and writes of files."""

    @property
    def files(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def buffered_files(self) -> int:
        """Return the number of files that are used without O_DIRECT. Their bytes go through the page cache.

        A file system may refuse O_DIRECT at the open or at the first operation.
        """
    @property
    def now_ns(self) -> int: ...

class ThreadIo(Io):
    """An I/O engine with `threads` workers per file, which use pread and pwrite.

    `files` has pairs of a file descriptor and a path. The engine duplicates the descriptors.
    """

    def __init__(self, files: Sequence[tuple[int, str]], threads: int = 4) -> None: ...

class MemoryIo(Io):
    """A deterministic I/O engine with files in memory and virtual time.

    The thread that waits for a transfer does all work of the engine.
    """

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
    """An I/O engine that wraps another I/O engine and injects faults by rules."""

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
    ) -> None:
        """Add a rule that injects a fault. An operation matches the rule by `op` and `file`.

        The `nth` matching operation has this fault. With `sticky`, all later matching operations have this
        fault as well.
        """
    def clear(self) -> None: ...
    def deliver(self) -> int:
        """Run and complete now the operations that rules have dropped or stalled. Return the number of these
        operations."""
    def operations(self, op: Literal["read", "write", "any"] = "any") -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def dropped(self) -> int: ...

class Copier:
    """A way to copy bytes between tensors and slabs (buffers).

    Without a copier, the tensors are in RAM, and the transfer engine copies and digests their bytes in one
    pass.
    """

class NoCopier(Copier):
    """A copier that copies nothing, to measure drives and slabs. The transfer engine then needs
    `checksums=False`."""

    def __init__(self) -> None: ...

class CudaCopier(Copier):
    """A copier for tensors in device memory. If `context` is 0, it uses the current CUDA context.

    Record an event before you pass its handle as `event`. In CUDA, a wait for an event that was never
    recorded returns immediately, without an error.
    """

    def __init__(self, library: str = "libcuda.so.1", context: int = 0) -> None: ...
    def pin(self, slabs: Slabs) -> int:
        """Pin the arena's memory for copies by the GPU, until `unpin` is called or this copier is destroyed.

        Return the driver's error number, or 0 for success.
        """

    def unpin(self, slabs: Slabs) -> int:
        """Undo `pin`. No copy to or from the arena may be in flight."""

    def stream(self, priority: int = 0) -> int:
        """Make a CUDA stream that only the caller uses, and return its handle.

        The stream lives as long as the process.
        """

    def give_to(self, stream: int, on_device: int, in_host: int, bytes: int, out: bool) -> int:
        """Queue a copy on a stream, without waiting for the copy. With `out`, copy from the device to the
        host, otherwise from the host to the device.

        The host memory must be pinned. Return the driver's error number, or 0 if the copy is queued.
        """

class Transfers:
    """The transfer engine. It never blocks when a transfer is submitted.

    It raises QueueFull if `max_transfers` tickets are unfinished. `deadline_s` limits the time of each
    operation, from the moment at which the drive gets the operation.
    """

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
        """Submit a copy from memory to files and return its ticket.

        The memory must remain allocated and unchanged until the ticket is finished.
        """
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
        """Submit a copy from files to memory and return its ticket.

        `pieces`, `tag` and `generation` must be the same as in the call of `out` that wrote the bytes. Read
        the memory only after the ticket is done.
        """
    def done(self, ticket: int) -> bool:
        """Return True if the transfer has ended, with success or not. `wait` then returns immediately."""
    def state(self, ticket: int) -> Literal["active", "done", "failed", "cancelled"]: ...
    def wait(self, ticket: int, name: str = "", keep: bool = False) -> bool:
        """Wait for a transfer. Return True if all bytes were copied, False if the transfer was cancelled. If
        the transfer failed, raise a StoreError.

        The error has the attributes kind, mismatch, errno, tag, generation, file, offset, bytes, retries and
        deadline_s. The ticket is released, unless `keep` is set. A queued prefetch becomes a demand. Ctrl-C
        interrupts the wait, and then the ticket remains valid.
        """
    def cancel(self, ticket: int) -> bool:
        """Remove the queued operations of a transfer. Operations that already run are finished.

        Return True if no operation had started. The ticket must still be released.
        """
    def promote(self, ticket: int) -> bool:
        """Turn a prefetch into a demand, which overtakes prefetches.

        Return False if the transfer was a demand already, or if no operation of the transfer is queued.
        """
    def release(self, ticket: int) -> None:
        """Release a ticket. An unfinished transfer still runs to its end. If it fails, the failure is only
        counted."""
    def times(self, ticket: int) -> tuple[int, int, int]:
        """Return (submitted, started, finished) in ns of time.monotonic_ns. A time that is not reached yet is
        0."""
    def forget(self, pieces: Sequence[Piece]) -> None:
        """Forget the contents of these pieces. A later read of these pieces is an error."""
    def lost(self) -> list[Piece]:
        """Return the pieces of files that timed-out writes may still change.

        Never reuse these pieces, because the drive may still write to them.
        """
    def stats(self) -> dict[str, int | float]: ...
    def close(self, within_s: float = 5.0) -> bool:
        """Cancel queued operations, finish running operations and join the threads.

        Return False if an operation hangs.
        """

def close_all() -> None: ...
def digest(address: int, size_bytes: int) -> int: ...
def copy_digest(target: int, source: int, size_bytes: int) -> int: ...
def copy(target: int, source: int, size_bytes: int) -> None: ...

Integers = NDArray[Any]
"""A contiguous array of int64. Functions raise ValueError for values out of range, and OverflowError for
times that add up to 2**62."""

def settle(
    durations_ns: Integers, lanes: Integers, groups: Integers, transfers: Integers
) -> tuple[int, int, Integers]:
    """Simulate steps until they repeat. Return (period in ns, number of steps, time of each tick). A tick is
    the index of a kernel in the step. Its time is the time at which the last step reaches the kernel.

        lanes       rows of (bytes/s, latency, group or -1)
        groups      the shared bytes/s of each group
        transfers   rows of (lane, ns, bytes, issue tick, wait tick, is a fetch), in the order of the plan
    """

def last_step(
    durations_ns: Integers, lanes: Integers, groups: Integers, transfers: Integers
) -> tuple[int, Integers, Integers, Integers]:
    """Simulate steps like settle(). Return the times of the last step, measured from its start.

    The four results are the step's duration, the time of each tick, the start and end of each transfer, and
    the tick and the ns of each stall.
    """

class Search:
    """A large-neighbourhood search for plans. A gap is an idle interval of a tensor between two uses.

        gaps               one row per gap: (tensor, start, end, version or -1, age, bytes)
        absences           one row per gap: (1 if evicted, out, free, trigger)
        lives              one row per tensor: (first tick, end)
        routes             one route per tensor, or -1 for a tensor without a route
        held_bytes         bytes by route and tick
        write_ns, read_ns  times by gap and route

    The constructor raises ValueError if `absences` and `routes` are no valid plan.
    """

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
        """Run at most `rounds` rounds of the search, and return the number of rounds that ran.

        The search ends earlier when `time.monotonic_ns()` reaches `until_ns` (0: no limit), or when the plan
        has no stall.
        """
    @property
    def best_ns(self) -> int: ...
    @property
    def evaluations(self) -> int: ...
    def best(self) -> Integers:
        """Return `absences` of the best plan as one flat array, with four numbers per gap."""
    def best_routes(self) -> Integers: ...

class SpareCounts:
    """Counts of the memory of CPU tensors: blocks in use, and freed pages that are kept."""

    @property
    def used_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int:
        """Return the maximum of the bytes in use since `reset_peak`."""
    @property
    def spare_bytes(self) -> int: ...
    @property
    def mapped_bytes(self) -> int:
        """Return the number of bytes that the allocator has mapped from the system since the start."""
    @property
    def reused_bytes(self) -> int:
        """Return the number of bytes of kept pages that new blocks have reused since the start."""
    @property
    def gathered_bytes(self) -> int:
        """Return the number of reused bytes whose pages were moved from several ranges to one address."""
    @property
    def moves(self) -> int: ...
    @property
    def limit_bytes(self) -> int: ...

class Spare:
    """An allocator of CPU memory that keeps freed pages for reuse, within a limit."""

    LEAST: int  # in bytes; smaller blocks come from malloc

    def __init__(self) -> None: ...
    def take(self, size_bytes: int) -> int: ...
    def give(self, address: int) -> None: ...
    def vacate(self, address: int) -> int:
        """Take the pages from a block, and keep them for other blocks. Return the number of bytes that the
        caller must unmap.

        Afterwards, access to the block's addresses faults. For a small block, return 0 and change nothing.
        """
    def holds(self, address: int) -> bool:
        """Return True if a block in use begins at this address.

        Small blocks, which come from malloc, do not count.
        """
    def keep_within(self, size_bytes: int) -> None:
        """Limit the sum of used bytes and kept bytes. If the used bytes alone exceed the limit, no page is
        kept."""
    def end_stretch(self) -> None:
        """End a stretch. A stretch is the time between two calls of this method.

        Unmap the pages that no block used in the last two stretches.
        """
    def reset_peak(self) -> None: ...
    def counts(self) -> SpareCounts: ...

def spare() -> Spare:
    """Return the CPU allocator of this process."""

def spare_functions() -> tuple[int, int]:
    """Return the addresses of `void* take(uint64_t bytes)` and `void give(void* block)` of `spare()`."""

def spare_vacate() -> int:
    """Return the address of `uint64_t vacate(void* block)` of the CPU allocator."""
