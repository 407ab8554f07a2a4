"""Tests of an engine's life: the GIL, tickets, memory growth, close, forks, signals, and the end of the
process."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from children import ended
from memory_maps import rights
from transfer_rig import BLOCK, Memory, Rig, open_direct

from teraio import _native

SLAB = 16 * BLOCK
TRIES = 5


def threads_of_ours() -> int:
    names = [Path(f"/proc/self/task/{t}/comm") for t in os.listdir("/proc/self/task")]
    return sum(name.read_text().startswith("teraio-io") for name in names if name.exists())


def test_wait_releases_the_gil(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.fault.add("drop", "write")
        waiting, seen = threading.Event(), [0]

        def other() -> None:
            """Complete the transfer for which the main thread waits, after ten turns of a loop in this
            thread."""
            waiting.wait()
            while seen[0] < 10 or not rig.fault.dropped:
                seen[0] += 1
                time.sleep(0.005)
            rig.fault.deliver()

        thread = threading.Thread(target=other)
        thread.start()
        source = Memory(SLAB)
        ticket = rig.t.out(source.address, SLAB, [(0, 0, SLAB)], 1, 1)
        waiting.set()
        assert rig.t.wait(ticket)
        thread.join()
        assert seen[0] >= 10


def test_several_threads_can_submit_and_wait_at_once(tmp_path: Path) -> None:
    with Rig(tmp_path, files=2, slabs=6, depth=3) as rig:
        wrong: list[int] = []

        def worker(number: int) -> None:
            source, target = Memory(5 * SLAB + number, seed=number), Memory(5 * SLAB + number)
            pieces = [(number % 2, number * 8 * SLAB, source.size)]
            for generation in range(30):
                rig.out(source, pieces, number, generation)
                rig.into(target, pieces, number, generation)
                if target.get() != source.get():
                    wrong.append(generation)

        threads = [threading.Thread(target=worker, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_released_ticket_is_unknown_forever() -> None:
    with Rig() as rig:
        a = Memory(BLOCK, seed=1)
        first = rig.t.out(a.address, BLOCK, [(0, 0, BLOCK)], 1, 1)
        assert rig.t.wait(first)
        second = rig.t.out(a.address, BLOCK, [(0, 0, BLOCK)], 1, 2)
        assert first != second
        for call in (rig.t.wait, rig.t.done, rig.t.cancel, rig.t.release, rig.t.times, rig.t.promote):
            with pytest.raises(ValueError, match="unknown"):
                call(first)
        with pytest.raises(ValueError, match="unknown"):
            rig.t.wait(12345)
        assert rig.t.wait(second)


def test_transfer_of_ticket_released_early_ends_and_its_failure_is_counted() -> None:
    with Rig() as rig:
        a = Memory(BLOCK, seed=1)
        early = rig.t.out(a.address, BLOCK, [(0, 0, BLOCK)], 1, 1)
        rig.t.release(early)
        with pytest.raises(ValueError, match="unknown"):
            rig.t.times(early)
        rig.out(a, [(0, BLOCK, BLOCK)], tag=2)
        rig.into(a, [(0, 0, BLOCK)])
        rig.fault.add("ENOSPC", "write")
        rig.t.release(rig.t.out(a.address, BLOCK, [(0, 0, BLOCK)], 1, 1))
        rig.out(a, [(0, BLOCK, BLOCK)], tag=2)
        assert rig.t.stats()["unobserved_failures"] == 1 and rig.t.stats()["unfinished"] == 0


def test_times_are_of_the_monotonic_clock(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        before = time.monotonic_ns()
        source = Memory(SLAB)
        ticket = rig.t.out(source.address, SLAB, [(0, 0, SLAB)], 1, 1)
        rig.t.wait(ticket, keep=True)
        submitted, started, finished = rig.t.times(ticket)
        assert before <= submitted <= started < finished <= time.monotonic_ns()
        rig.t.release(ticket)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_many_transfers_grow_no_memory() -> None:
    with Rig(files=2, slabs=4, memory={"latency_ns": 0, "ns_per_byte": 0}) as rig:
        a = Memory(3 * BLOCK + 5, seed=1)

        def churn(rounds: int) -> None:
            for i in range(rounds):
                size = 1 + i * 37 % a.size
                piece = [(i % 2, i % 64 * 4 * BLOCK, size)]
                rig.t.wait(rig.t.out(a.address, size, piece, 1, i))
                rig.t.wait(rig.t.into(a.address, size, piece, 1, i))

        churn(5000)
        grown = []
        # A leak shows in every try, but pages that the system adds show only in some tries.
        for _ in range(TRIES):
            base = resident_bytes()
            churn(40000)
            grown.append(resident_bytes() - base)
            if grown[-1] < 512 * 1024:
                break
        assert min(grown) < 512 * 1024, grown
        assert rig.t.stats()["blocks"] <= 128 and rig.t.stats()["unfinished"] == 0


def are_soon(threads: int) -> bool:
    """Wait until the process has this number of threads. Return True if that happens in time.

    After a thread is joined, /proc still lists the thread for a short time.
    """
    until = time.monotonic() + 60
    while threads_of_ours() != threads and time.monotonic() < until:
        time.sleep(0.01)
    return threads_of_ours() == threads


def test_closed_engine_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    gc.collect()
    time.sleep(0.1)  # time in which threads of earlier tests end
    fds, threads = len(os.listdir("/proc/self/fd")), threads_of_ours()
    for i in range(30):
        rig = Rig(tmp_path, files=2, depth=4)
        a = Memory(SLAB, seed=i)
        rig.out(a, [(0, 0, SLAB)])
        assert are_soon(threads + 8)
        if i % 2:
            assert rig.t.close()
        del rig  # without a call of close(), the destructor closes the engine
    gc.collect()
    assert are_soon(threads) and len(os.listdir("/proc/self/fd")) == fds


def test_close_ends_running_drops_queued_and_refuses_new_transfers(tmp_path: Path) -> None:
    with Rig(tmp_path, slabs=2, depth=1) as rig:
        a = Memory(200 * SLAB, seed=1)  # all writes together would take 6 s
        rig.fault.add("delay", "write", sticky=True, delay_s=0.03)
        ticket = rig.t.out(a.address, a.size, [(0, 0, a.size)], 1, 1)
        assert rig.t.close(5.0) is True
        assert rig.fault.operations("write") < 200
        assert rig.t.wait(ticket) is False
        with pytest.raises(RuntimeError, match="closed"):
            rig.t.out(a.address, SLAB, [(0, 0, SLAB)], 1, 1)
        assert rig.t.close()


def test_close_does_not_wait_for_a_hanging_drive(tmp_path: Path) -> None:
    rig = Rig(tmp_path, slabs=2, depth=1)
    target = Memory(SLAB, seed=1)
    rig.out(target, [(0, 0, SLAB)])
    rig.fault.add("delay", "read", delay_s=2.5)
    ticket = rig.t.into(target.address, SLAB, [(0, 0, SLAB)], 1, 1)
    time.sleep(0.4)
    began = time.monotonic()
    assert rig.t.close(0.1) is False
    assert time.monotonic() - began < 2.0
    then = target.get()
    assert rig.t.wait(ticket) is False
    del rig
    gc.collect()
    # During this pause, the engine's thread ends its read. Until then, the engine's state and slab must
    # remain allocated.
    time.sleep(2.6)
    assert target.get() == then


def test_state_outlives_an_engine_with_a_hanging_operation(tmp_path: Path) -> None:
    """Run in a process that overwrites freed memory.

    If the engine's state were freed too early, the engine's thread would read garbage.
    """
    done = run_python(
        f"""
rig = Rig(Path({str(tmp_path)!r}), slabs=64, depth=1)  # many: small blocks are not overwritten when freed
a = Memory(65536, seed=1)
rig.fault.add("delay", "write", delay_s=2.5)
rig.t.out(a.address, a.size, [(0, 0, a.size)], 1, 1)
time.sleep(0.4)
print(rig.t.close(0.05))
del rig
time.sleep(2.6)
print("end")
""",
        MALLOC_PERTURB_="165",
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["False", "end"], "")


def run_python(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    head = "import os, sys, time\nfrom pathlib import Path\n"
    head += f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    head += "from transfer_rig import *\n"
    return ended([sys.executable, "-c", head + body], env={**os.environ, **environment})


def test_engine_is_inert_in_a_forked_child(tmp_path: Path) -> None:
    done = run_python(f"""
rig = Rig(Path({str(tmp_path)!r}), slabs=4, depth=2)
rig.fault.add("delay", "write", delay_s=0.3)
a = Memory(30 * 65536, seed=1)
ticket = rig.t.out(a.address, a.size, [(0, 0, a.size)], 1, 1)
time.sleep(0.05)
pid = os.fork()
if pid == 0:
    again = lambda: rig.t.out(a.address, 1, [(0, 0, 1)], 1, 1)
    for call in (again, lambda: rig.t.wait(ticket), lambda: rig.t.done(ticket)):
        try:
            call()
            os._exit(3)
        except RuntimeError as e:
            assert "parent" in str(e)
    fresh = Rig(slabs=2)
    fresh.out(Memory(100, seed=1), [(0, 0, 100)])
    assert not rig.t.close()
    del rig, fresh
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
assert rig.t.wait(ticket)
b = Memory(a.size)
rig.into(b, [(0, 0, a.size)])
print(b.get() == a.get(), rig.t.close())
""")
    assert done.stdout.split() == ["7", "True", "True"], done.stderr


def test_slabs_are_not_mapped_in_a_child() -> None:
    """Check that no slab is mapped in a forked child.

    If a slab were mapped in the child, a write to the slab would copy its pages.
    """
    slabs = _native.Slabs(SLAB, 4)

    assert rights(slabs.address)
    child = os.fork()
    if child == 0:
        os._exit(1 if rights(slabs.address) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_interpreter_can_end_with_transfers_in_flight(tmp_path: Path) -> None:
    began = time.monotonic()
    done = run_python(f"""
rig = Rig(Path({str(tmp_path)!r}), slabs=4, depth=2)
rig.fault.add("delay", "write", sticky=True, delay_s=0.05)
a = Memory(500 * 65536, seed=1)
rig.t.out(a.address, a.size, [(0, 0, a.size)], 1, 1)
print("end")
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("kind", ["kill", "killed"])
def test_kill_fault_ends_the_process_at_its_operation(tmp_path: Path, kind: str) -> None:
    done = run_python(f"""
rig = Rig(Path({str(tmp_path)!r}), slabs=4, depth=1)
rig.fault.add({kind!r}, "write", nth=3)
a = Memory(5 * 65536, seed=1)
rig.out(a, [(0, 0, a.size)])
print("not reached")
""")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    assert (tmp_path / "store0").stat().st_size == (3 if kind == "killed" else 2) * SLAB


def test_ctrl_c_interrupts_a_wait_and_the_ticket_is_still_valid(tmp_path: Path) -> None:
    done = run_python(f"""
import signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs inherit an ignored SIGINT
rig = Rig(Path({str(tmp_path)!r}), slabs=4, depth=2)
rig.fault.add("drop", "write")
a = Memory(65536, seed=1)
ticket = rig.t.out(a.address, a.size, [(0, 0, a.size)], 1, 1)
while not rig.fault.dropped:
    time.sleep(0.01)
try:
    threading.Timer(0.2, lambda: os.kill(os.getpid(), {int(signal.SIGINT)})).start()
    rig.t.wait(ticket)
except KeyboardInterrupt:
    print("heard", rig.fault.deliver(), rig.t.wait(ticket))
""")
    assert done.stdout.split() == ["heard", "1", "True"], done.stderr


def test_engine_has_its_own_file_descriptors(tmp_path: Path) -> None:
    fd = open_direct(tmp_path / "a")
    t = _native.Transfers(_native.ThreadIo([(fd, "a")], threads=1), _native.Slabs(SLAB, 2))
    os.close(fd)
    victim = os.open(tmp_path / "victim", os.O_RDWR | os.O_CREAT)
    a = Memory(SLAB, seed=1)
    assert t.wait(t.out(a.address, SLAB, [(0, 0, SLAB)], 1, 1)) and t.close()
    assert os.fstat(victim).st_size == 0 and os.path.getsize(tmp_path / "a") == SLAB
    os.close(victim)


def test_started_program_inherits_no_store_file(tmp_path: Path) -> None:
    """Check that a started program inherits no descriptor of a store's file. An inherited descriptor would
    keep the disk space of a closed store."""
    with Rig(tmp_path, files=2):
        paths = {str(path) for path in tmp_path.iterdir()}
        ours = [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") in paths]
        assert len(ours) == 2, "this test does not see descriptors"
        listing = (
            "import os; print(*(os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')))"
        )
        done = subprocess.run(
            [sys.executable, "-c", listing], capture_output=True, text=True, check=True, close_fds=False
        )
        assert not paths & {*done.stdout.split()}
