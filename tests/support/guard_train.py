"""Trainings in their own process, whose user code touches weights in every way.

    guard_train.py '["plain", ["prints", "nothing is fetched"], ...]'

The script trains a small model per scenario two times: plainly, and within a budget that is smaller than the
model's weights and gradients together. The script prints one JSON line per scenario. The line tells whether
losses and weights are bitwise equal, and holds the engine's counts and the number of compiled graphs. If an
argument is a pair, its second element names a bug to plant.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import io
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import steady
import torch
from guard_model import WIDTH, Model

import teraio
from teraio.runtime.eager import user_code
from teraio.runtime.engine import engine
from teraio.runtime.ledger.record import State
from teraio.runtime.torch_extension import observer

ROWS, STEPS = 32, 8
FROZEN = ("frozen", "frozen, touched", "frozen, written", "frozen, by pointer")
BUDGET = dict.fromkeys(("streamed", *FROZEN), "8MiB")
BUDGET["keeps views"] = "6.5MiB"
BUDGET["eager blocks"] = "9.5MiB"
BUDGET["lends addresses"] = "7.5MiB"
# Weights take 6 MiB, gradients 6 MiB, and teraio reserves 4 MiB. Each optimizer updates one block.
USUAL = "11.5MiB"


class Run:
    """One training. User code reads `model`, and calls `compiled`."""

    def __init__(self, scenario: str, memory: str | None) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        self.scenario = scenario
        self.model = Model(scenario)
        if scenario.startswith("frozen"):
            for number, parameter in enumerate(self.model.parameters()):
                parameter.requires_grad_(number >= 22)
        trained = [[p for p in b.parameters() if p.requires_grad] for b in self.model.blocks]
        if scenario == "eager blocks":
            trained = [[p for block in trained for p in block]]
        self.optimizers = [torch.optim.SGD(block, lr=0.1) for block in trained if block]
        if memory is None:
            os.environ["TERAIO_DISABLE"] = "1"
        else:
            os.environ.pop("TERAIO_DISABLE", None)
        self.losses: list[float] = []
        self.kept: list[Any] = []  # tensors and objects that user code keeps alive
        FIRST.get(scenario, lambda run: None)(self)
        options: Any = {
            "inner": "eager",
            "warmup": 2,
            "planning": "inline",
            **({"memory": memory} if memory else {}),
        }
        if scenario == "blocks":
            for block in self.model.blocks:
                block.compile(backend="teraio", options=options)
        self.compiled: Any = (
            self.model
            if scenario == "blocks"
            else torch.compile(self.model, backend="teraio", options=options)
        )
        self.written: list[int] = []  # for each step, the total number of bytes written until its end
        self.touches: list[int] = []  # for each step, the number of touches until its end
        self.evicted: set[int] = set()  # the different counts of evicted tensors that `look` has found

    def train(self) -> None:
        generator = torch.Generator().manual_seed(3)
        for step in range(STEPS):
            x = torch.randn(ROWS, WIDTH, generator=generator)
            x = BEFORE.get(self.scenario, lambda run, x: x)(self, x)
            if self.scenario == "streamed":
                with torch.no_grad():
                    self.losses.append(self.compiled(x).square().mean().item())
            else:
                loss = self.compiled(x).square().mean()
                loss = BETWEEN.get(self.scenario, lambda run, step, loss: loss)(self, step, loss)
                self.look()
                loss.backward()
                self.look()
                LATER.get(self.scenario, lambda run: None)(self)
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                self.losses.append(loss.item())
                AFTER.get(self.scenario, lambda run, step: None)(self, step)
            self.look()
            self.written.append(teraio.stats().get("written_bytes", 0))
            self.touches.append(teraio.stats().get("touches", 0))

    def look(self) -> None:
        if engine.ENGINE is not None:
            known = engine.ENGINE.residency.reachable.values()
            self.evicted.add(sum(record.state is State.EVICTED for record in known))

    def first(self) -> torch.nn.Parameter:
        return self.model.blocks[0].up.weight  # type: ignore[return-value, union-attr]


# ---- user code before compilation


def hooks_first(run: Run) -> None:
    """Register hooks that read gradients as soon as they exist, often before any other code reads them."""
    for parameter in run.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: run.losses.append(p.grad.sum().item()))


FIRST: dict[str, Callable[[Run], None]] = {"hooks first": hooks_first}


# ---- user code before the forward: (run, input) -> input


def mixes_in(run: Run, x: torch.Tensor) -> torch.Tensor:
    """Use weights eagerly, so that autograd saves them. Autograd's C++ code reads the saved weights after the
    compiled backward.
    """
    return x + 1e-3 * sum(block.up.weight.square().mean() for block in run.model.blocks)  # type: ignore


BEFORE: dict[str, Callable[[Run, torch.Tensor], torch.Tensor]] = {"mixes in": mixes_in}


# ---- user code between forward and backward: (run, step, loss) -> loss


def prints(run: Run, step: int, loss: torch.Tensor) -> torch.Tensor:
    for parameter in run.model.parameters():
        run.losses.append(float(repr(parameter.sum().item())))
    repr(run.first())
    return loss


def gives_views(run: Run, step: int, loss: torch.Tensor) -> torch.Tensor:
    """Add a term to the loss that uses the model's views. One backward then goes through the program and the
    views.
    """
    assert len(run.model.given) == len(run.model.blocks)
    return loss + 1e-3 * sum(view.square().mean() for view in run.model.given)


BETWEEN: dict[str, Callable[[Run, int, torch.Tensor], torch.Tensor]] = {
    "prints": prints,
    "gives views": gives_views,
    "frozen, touched": prints,
}


# ---- user code between backward and optimizer, when most of the memory is gradients


def prints_later(run: Run) -> None:
    prints(run, 0, torch.zeros(()))


def clips(run: Run) -> None:
    run.losses.append(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.01).item())


def reads_views(run: Run, step: int = 0) -> None:
    run.losses += [view.sum().item() for view in (*run.model.given, *run.kept)]


LATER: dict[str, Callable[[Run], None]] = {
    "prints": prints_later,
    "gives views": reads_views,
    "clips": clips,
    "writes data": lambda run: writes_data(run, 0),
    "keeps views": lambda run: keeps_views(run, 1),
}


# ---- user code after the step: (run, step)


def writes_data(run: Run, step: int) -> None:
    for block in run.model.blocks:
        block.up.weight.data.mul_(0.99)  # type: ignore[union-attr, operator]


def writes_in_place(run: Run, step: int) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(run.model.parameters()), 0.99)


def keeps_views(run: Run, step: int) -> None:
    """Make views in the first step, and write through them in every step."""
    if step == 0:
        run.kept = [block.up.weight.data for block in run.model.blocks]  # type: ignore[union-attr]
    for view in run.kept:
        view.mul_(0.99)


def writes_by_pointer(run: Run, step: int) -> None:
    address = run.first().data_ptr()
    (ctypes.c_float * 4).from_address(address)[0] = 0.25 * step


def writes_resident_by_pointer(run: Run, step: int) -> None:
    """Read a weight, so that it is resident, then write to it through its address. No other code ever writes
    to this weight.
    """
    run.losses.append(run.first().sum().item())
    writes_by_pointer(run, step)


def saves(run: Run, step: int) -> None:
    stream = io.BytesIO()
    torch.save(run.model.state_dict(), stream)
    run.losses.append(float(len(stream.getvalue())))
    if step == 3:
        stream.seek(0)
        run.model.load_state_dict({k: v * 0.5 for k, v in torch.load(stream).items()})


def copies(run: Run, step: int) -> None:
    twin = copy.deepcopy(run.model)
    again = pickle.loads(pickle.dumps(run.model))
    for one, other, mine in zip(twin.parameters(), again.parameters(), run.model.parameters()):
        assert type(one) is type(other) is torch.nn.Parameter
        assert torch.equal(one, mine)
        assert torch.equal(other, mine)


def evaluates(run: Run, step: int) -> None:
    """Evaluate the model eagerly, then the compiled model, both without gradients."""
    with torch.no_grad():
        run.losses.append(run.model(torch.ones(4, WIDTH)).sum().item())
        run.losses.append(run.compiled(torch.ones(ROWS, WIDTH)).sum().item())


def averages(run: Run, step: int) -> None:
    if not run.kept:
        run.kept = [copy.deepcopy(run.model)]
    with torch.no_grad():
        for mean, now in zip(run.kept[0].parameters(), run.model.parameters()):
            mean.lerp_(now, 0.1)
    run.losses.append(sum(p.sum().item() for p in run.kept[0].parameters()))


def replaces(run: Run, step: int) -> None:
    """Give a parameter another storage by `.data =`."""
    if step == 4:
        run.first().data = torch.full_like(run.first(), 0.01)


def exchanges(run: Run, step: int) -> None:
    """Evaluate with averaged weights, then restore the trained weights. During the evaluation, only `backup`
    refers to the trained weights.
    """
    parameters = list(run.model.parameters())
    if not run.kept:
        run.kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for mean, now in zip(run.kept, parameters):
            mean.lerp_(now, 0.1)
        backup = [p.data for p in parameters]
        for mean, now in zip(run.kept, parameters):
            now.data = mean
        run.losses.append(run.compiled(torch.ones(ROWS, WIDTH)).sum().item())
        run.losses += [old.sum().item() for old in backup]
        for old, now in zip(backup, parameters):
            now.data = old


def lends_addresses(run: Run, step: int) -> None:
    """Give weights' addresses to another library, which keeps the addresses. Torch does not count such
    references, so the engine must not move the weights.
    """
    weights: list[Any] = [run.first(), run.model.blocks[3].down.weight]  # type: ignore[union-attr]
    if step == 2:
        capsules = [torch.utils.dlpack.to_dlpack(weight) for weight in weights]
        run.kept = [torch.utils.dlpack.from_dlpack(capsule) for capsule in capsules]
    with torch._C.DisableTorchFunctionSubclass():
        addresses = [torch.Tensor.data_ptr(weight) for weight in weights[: len(run.kept)]]
    assert addresses == [lent.data_ptr() for lent in run.kept]
    reads_views(run)


def forks(run: Run, step: int) -> None:
    """Read weights in a forked child, where the engine is inert. Resident weights can be read, and evicted
    weights raise an error.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for parameter in run.model.parameters():
                parameter.sum()
            code = 0
        except RuntimeError as error:
            code = 0 if "teraio.resident(" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


AFTER: dict[str, Callable[[Run, int], None]] = {
    function.__name__.replace("_", " "): function
    for function in (
        writes_data,
        writes_in_place,
        keeps_views,
        writes_by_pointer,
        saves,
        copies,
        evaluates,
        averages,
        replaces,
        exchanges,
        lends_addresses,
        forks,
    )
}
AFTER["gives views"] = reads_views
AFTER["frozen, written"] = writes_in_place
AFTER["frozen, by pointer"] = writes_resident_by_pointer


LEAVE = observer.Observer.empty_storage
# Each of these bugs must change the numbers or end in an error.
PLANTS: dict[str, list[Any]] = {
    "nothing is fetched": [
        patch.object(user_code.UserCode, "fetch_for_reader", lambda self, keys, place: None)
    ],
    "no write is noted": [
        patch.object(observer.Observer, "is_written_since_copy", lambda self, key: False),
        patch.object(
            observer.Observer, "empty_storage", lambda self, storage, _: LEAVE(self, storage, False)
        ),
    ],
    "addresses are forgotten": [
        patch.object(user_code.UserCode, "keep_exported_resident", lambda self, key: None)
    ],
}


@contextlib.contextmanager
def planted(bug: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for plant in PLANTS.get(bug, ()):
            stack.enter_context(plant)
        yield


def compiles() -> list[int]:
    """Return the numbers of Dynamo's graphs and frames. Some frames have no graph."""
    counters = torch._dynamo.utils.counters
    return [counters["stats"]["unique_graphs"], counters["frames"]["total"]]


def compare(scenario: str) -> dict[str, Any]:
    plain, ours = Run(scenario, None), None
    plain.train()
    compiled = compiles()
    ours = Run(scenario, BUDGET.get(scenario, USUAL))
    ours.train()
    counts = teraio.stats()
    result = {
        "compiles": [compiled, compiles()],
        "counts": counts,
        "written": [after - before for before, after in zip(ours.written, ours.written[1:])],
        "touches of first step": ours.touches[0],
        "away": max(ours.evicted),
    }
    teraio.reset()
    weights = list(zip(plain.model.parameters(), ours.model.parameters()))
    result["same"] = plain.losses == ours.losses and all(torch.equal(one, other) for one, other in weights)
    result["plain types"] = all(type(p) is torch.nn.Parameter for p in ours.model.parameters())
    return result


def main() -> None:
    torch.set_num_threads(1)
    steady.plans()
    for request in json.loads(sys.argv[1]):
        scenario, bug = request if isinstance(request, list) else (request, "")
        with planted(bug):
            result = compare(scenario)
        print(json.dumps({"scenario": scenario, "bug": bug, **result}), flush=True)


if __name__ == "__main__":
    main()
