"""Cases in which code outside of Python's tensor classes reads evicted tensors: extensions, threads,
finalizers, forks.

Each case is a function. The script prints the results of each case.

    observer_child.py CASE...
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from eager_beside import WIDTH, evict_all, layer, record
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import teraio
from teraio.errors import StoreError
from teraio.runtime.engine import engine
from teraio.runtime.ledger.mover import Mover
from teraio.runtime.ledger.record import State
from teraio.runtime.torch_extension import build

SOURCE = Path(__file__).parents[1] / "native" / "reader.cpp"
LAYERS = 8
PATIENCE_MS = 300
THREADS, ROUNDS = 4, 8


class Finalizer:
    """An object whose finalizer reads a tensor when Python collects the object."""

    def __init__(self, tensor: torch.Tensor, found: list[float]) -> None:
        self.tensor, self.found, self.itself = tensor, found, self

    def __del__(self) -> None:
        self.found.append(float(self.tensor.detach().double().sum()))


class World:
    """A model with a small budget, and the sum of each weight's elements."""

    def __init__(self, memory: str = "64MiB") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.compiled = torch.compile(
            self.model, backend="teraio", options={"inner": "eager", "memory": memory}
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.weights = [layer(self.model, number).weight for number in range(LAYERS)]
        self.sums = [float(weight.detach().double().sum()) for weight in self.weights]
        self.step()

    def step(self) -> None:
        self.compiled(torch.ones(4, WIDTH)).sum().backward()
        self.optimizer.step()

    def evict(self) -> None:
        evict_all()
        assert all(record(weight).state is State.EVICTED for weight in self.weights)

    @property
    def observer(self) -> Any:
        assert engine.ENGINE is not None
        return engine.ENGINE.user.observer


@cache
def built() -> Path:
    """Compile the extension unless it is compiled, and return its path. All cases share the folder that the
    test gives.
    """
    folder = Path(os.environ.get("READER_FOLDER") or tempfile.mkdtemp())
    return build.build_unless_built(SOURCE, ("c10", "torch_cpu"), folder)


class Reader:
    """The compiled extension, called with the GIL (`held`) or without the GIL."""

    def __init__(self, held: bool) -> None:
        self.library: Any = (ctypes.PyDLL if held else ctypes.CDLL)(str(built()))
        self.library.reader_message.restype = ctypes.c_char_p
        for way in ("operator", "data", "const_data"):
            getattr(self.library, f"reader_{way}").argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.library.reader_write.argtypes = [ctypes.c_void_p, ctypes.c_double]

    def one(self, way: str, tensor: torch.Tensor) -> float | str:
        found = ctypes.c_double()
        if getattr(self.library, f"reader_{way}")(tensor._cdata, ctypes.byref(found)):
            return str(self.library.reader_message().decode())
        return found.value

    def many(self, way: str, tensors: Sequence[torch.Tensor]) -> list[float] | str:
        addresses = (ctypes.c_void_p * len(tensors))(*[tensor._cdata for tensor in tensors])
        found = (ctypes.c_double * len(tensors))()
        if getattr(self.library, f"reader_{way}")(addresses, len(tensors), found):
            return str(self.library.reader_message().decode())
        return list(found)


def close(one: float | str, other: float) -> bool:
    # A tolerance is needed, because the extension adds elements in another order.
    return isinstance(one, float) and abs(one - other) < 1e-6


def extension() -> dict[str, Any]:
    world = World()
    found = {}
    for held in (False, True):
        reader = Reader(held)
        for way in ("operator", "data", "const_data"):
            world.evict()
            answer = [reader.one(way, weight) for weight in world.weights]
            found[f"{way}, GIL {'held' if held else 'free'}"] = all(map(close, answer, world.sums))
        world.evict()
        answers = reader.many("parallel", world.weights)
        found[f"parallel, GIL {'held' if held else 'free'}"] = all(map(close, answers, world.sums))
    world.evict()
    found["threads, GIL free"] = all(map(close, Reader(False).many("threads", world.weights), world.sums))
    return found


def custom_operator() -> dict[str, Any]:
    world = World()
    Reader(False)  # loading the extension registers the operator
    world.evict()
    scaled = torch.ops.reader.scaled(world.weights[0], 2.0)
    return {"same": torch.equal(scaled, world.weights[0].detach() * 2)}


def pointer_writes() -> dict[str, Any]:
    """Check that bytes written through an address survive the next eviction."""
    world, reader = World(), Reader(False)
    world.evict()
    answer = reader.library.reader_write(world.weights[1]._cdata, 3.0)
    world.evict()
    return {"told": answer, "same": bool((world.weights[1] == 3.0).all())}


def waits_for_us() -> dict[str, Any]:
    """Check a caller that holds the GIL while it waits for threads that read tensors. The caller must get an
    error instead of a deadlock.
    """
    world, reader = World(), Reader(True)
    world.observer.library.teraio_patience(PATIENCE_MS)
    world.evict()
    answer = reader.many("threads", world.weights)
    after = [float(weight.detach().double().sum()) for weight in world.weights]
    return {"error": isinstance(answer, str) and "releases the GIL" in answer, "after": after == world.sums}


def threads_and_finalizers() -> dict[str, Any]:
    """Check reads by threads and finalizers while compiled programs run."""
    world = World("5MiB")
    found: list[float] = []
    wrong: list[Any] = []
    stop = threading.Event()

    def reads(number: int) -> None:
        turn = number
        while not stop.is_set():
            turn = (turn * 5 + 3) % LAYERS
            got = float(world.weights[turn].detach().double().sum())
            if got != world.sums[turn]:
                wrong.append((turn, got))

    workers = [threading.Thread(target=reads, args=(number,)) for number in range(THREADS)]
    for worker in workers:
        worker.start()
    for number in range(ROUNDS):
        for at in range(LAYERS):
            Finalizer(world.weights[at], found)
        world.step()
        if number % 4 == 0:
            gc.collect()
    stop.set()
    for worker in workers:
        worker.join()
    gc.collect()
    finalized = len(found) == ROUNDS * LAYERS and all(value in world.sums for value in found)
    return {"wrong": wrong[:3], "finalized": finalized}


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def modes_are_restored() -> dict[str, Any]:
    """Check that a fetch does not change the user's modes. The user's dispatch mode must get no operator that
    the engine runs to fetch a tensor.
    """
    world = World()
    world.evict()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), Counting() as counting:
        made = world.weights[0] * 2
        kept = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()
    return {"names": counting.names, "kept": kept, "inference": made.is_inference()}


def arguments_are_kept() -> dict[str, Any]:
    """Check an operator whose arguments together are larger than the free budget. All arguments must be
    resident together, and the engine must report the overrun.
    """
    world = World("4608KiB")
    world.evict()
    stacked = torch.cat([weight.detach() for weight in world.weights])
    return {
        "same": [float(part.double().sum()) for part in stacked.chunk(LAYERS)] == world.sums,
        "overrun": teraio.stats()["overrun_bytes"] > 0,
    }


def store_fails() -> dict[str, Any]:
    """Check that a failed fetch raises an error that names the tensor. The case reads one tensor by an
    operator, and another tensor by its address.
    """
    world = World()
    world.evict()
    real = Mover.begin_fetch

    def fails(mover: Any, found: Any, **rest: Any) -> None:
        raise StoreError(f"planted: {found.name}")

    answer = []
    Mover.begin_fetch = fails  # type: ignore[assignment, method-assign]
    for read in (world.weights[0].abs, world.weights[1].data_ptr):
        try:
            read()
        except RuntimeError as error:
            answer.append("planted: " in str(error) and "user code" in str(error))
    Mover.begin_fetch = real  # type: ignore[method-assign]
    after = [float(weight.detach().double().sum()) for weight in world.weights]
    return {"told": answer, "after": after == world.sums}


def child_of_a_fork() -> dict[str, Any]:
    world = World()
    world.evict()
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            world.weights[0].sum()
        except RuntimeError as error:
            os.write(into, str(error).encode())
        os._exit(0)
    os.close(into)
    answer = os.read(out, 2**16).decode()
    return {"told": "was forked" in answer and "spawn" in answer, "code": os.waitpid(child, 0)[1]}


def profiler_beside() -> dict[str, Any]:
    world = World()
    world.evict()
    with torch.profiler.profile() as profile:
        found = [float(weight.detach().double().sum()) for weight in world.weights]
    seen = {event.key for event in profile.key_averages()}
    return {"same": found == world.sums, "seen": "aten::sum" in seen}


@torch.jit.script
def scripted(t: torch.Tensor) -> torch.Tensor:
    return torch.relu(t * 2 + 1) @ t


def where_no_class_is_asked() -> dict[str, Any]:
    """Check four reads: (1) by TorchScript, (2) by functions below Python's tensor classes, (3) by functorch,
    and (4) of the local tensor of a DTensor.
    """
    world, mesh = World(), one_rank()
    weight = world.weights[0]
    plain = weight.detach().clone()
    shards: Any = distribute_tensor(weight.detach(), mesh, [Shard(0)])
    local: Any = DTensor.from_local(weight.detach(), mesh, [Shard(0)])

    def below(t: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
            return t * 2

    found = {}
    ways: dict[str, Any] = {
        "script": scripted,
        "below": below,
        "grad": torch.func.grad(lambda t: (t @ t).sum()),  # type: ignore[misc]
        "vmap": torch.vmap(lambda row: row.sin().sum()),  # type: ignore[misc]
        "jacobian": lambda t: torch.func.jacrev(lambda x: (t[:2] @ x).sin())(torch.ones(WIDTH)),
    }
    for name, read in ways.items():
        expected = read(plain)
        world.evict()
        found[name] = torch.equal(read(weight.detach()), expected)
    world.evict()
    found["local"] = torch.equal((local * 2).to_local(), plain * 2)
    world.evict()
    found["shards"] = torch.equal((shards * 2).full_tensor(), plain * 2)
    torch.distributed.destroy_process_group()
    return found


def one_rank() -> Any:
    rendezvous = f"file://{tempfile.mktemp()}"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    return init_device_mesh("cpu", (1,))


class Renamed(nn.Sequential):
    """A model that Dynamo recompiles for each new name, until the recompile limit."""

    name = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x) * len(self.name)
        return out


def recompile_limit() -> dict[str, Any]:
    """Check a model that runs as Python after Dynamo's recompile limit. Its weights were evicted while
    compiled programs ran.
    """
    ends = []
    for memory in ("", "5500KiB"):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Renamed(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        options: Any = {"inner": "eager", "memory": memory}
        run = torch.compile(model, backend="teraio", options=options) if memory else model
        for number in range(6):
            model.name = "x" * number
            run(torch.ones(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    return {"same": all(map(torch.equal, *ends)), "moved": teraio.stats()["fetches"] > 0}


def pointers_at_once() -> dict[str, Any]:
    """Let several threads take an evicted tensor's address at the same moment. Check that each thread gets a
    valid address.

    Before code takes a storage's address, torch calls the storage's materializer, a callback that fetches the
    tensor. The first call clears the materializer while the other threads may call it.
    """
    world = World()
    wrong = 0
    for _ in range(ROUNDS):
        world.evict()
        barrier = threading.Barrier(THREADS)
        found: list[bool] = []

        def reads(barrier: threading.Barrier = barrier, found: list[bool] = found) -> None:
            barrier.wait()
            for weight, wanted in zip(world.weights, world.sums):
                taken = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
                found.append(abs(sum(taken) - wanted) < 1e-3)

        workers = [threading.Thread(target=reads) for _ in range(THREADS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        wrong += found.count(False) + (len(found) < THREADS * LAYERS)
    return {"wrong": wrong}


def ends_with_threads() -> dict[str, Any]:
    """Check the end of the process while threads that Python did not start still read tensors."""
    world, reader = World("5MiB"), Reader(False)
    for weight in world.weights[:2]:
        reader.library.reader_forever(ctypes.c_void_p(weight._cdata))
    for _ in range(3):
        world.step()
    return {"ended": True}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        extension,
        custom_operator,
        pointer_writes,
        waits_for_us,
        threads_and_finalizers,
        modes_are_restored,
        arguments_are_kept,
        store_fails,
        child_of_a_fork,
        profiler_beside,
        where_no_class_is_asked,
        recompile_limit,
        pointers_at_once,
        ends_with_threads,
    )
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 2
    for name in sys.argv[1:]:
        answer = CASES[name]()
        print(json.dumps({name: answer}), flush=True)
        if name != sys.argv[-1]:
            teraio.reset()
            torch._dynamo.reset()
