"""Trainings with updates in the backward, one per case. Most cases break an assumption of such updates.

    backward_cases.py '["plain loop", "clips", ...]'

The script prints one JSON object per case. For code that breaks an assumption, it has the error, and the line
of this code.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import operator
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import late_cases
import torch
from late_cases import ROWS, STEPS, WIDTH, Training, nothing, run_cases

import teraio
from teraio.runtime.engine import engine
from teraio.runtime.ledger.record import State
from teraio.runtime.optimizer import late_step

BREAKS = 6  # the step in which a case breaks an assumption; updates run in the backward from step 3 on
BROKEN = "# this line breaks an assumption"
OPTIONS = {**late_cases.OPTIONS, "inner": "eager", "updates": "backward"}

Act = Callable[["BackwardTraining"], object]


class BackwardTraining(Training):
    """A training with user code between the backward and `step()`."""

    before: Act = staticmethod(nothing)
    after: Act = staticmethod(nothing)

    def weight(self) -> torch.nn.Parameter:
        return dict(self.model.named_parameters())["layers.2.weight"]

    def loss(self) -> torch.Tensor:
        result: torch.Tensor = self.call(torch.randn(ROWS, WIDTH, generator=self.generator))
        return result

    def step(self) -> None:
        loss = self.loss()
        loss.backward()
        breaks = self.step_number == BREAKS
        self.before(self) if breaks else None
        self.optimizer.step()
        self.after(self) if breaks else None
        self.optimizer.zero_grad()
        self.step_number += 1
        self.seen.append(loss.item())


def trained(
    kind: type[BackwardTraining] = BackwardTraining, **acts: Any
) -> tuple[BackwardTraining, dict[str, Any]]:
    run = kind(partial(torch.compile, backend="teraio", options=OPTIONS))
    for name, act in acts.items():
        setattr(run, name, act)
    run.train(nothing)
    return run, dict(teraio.stats())


def plain_outcome(kind: type[BackwardTraining] = BackwardTraining, **acts: Any) -> list[Any]:
    with patch.dict(os.environ, {"TERAIO_DISABLE": "1"}):
        run = kind(partial(torch.compile, backend="teraio", options={"inner": "eager"}))
        for name, act in acts.items():
            setattr(run, name, act)
        run.train(nothing)
        return run.outcome()


def compared(kind: type[BackwardTraining] = BackwardTraining, **acts: Any) -> dict[str, Any]:
    expected = plain_outcome(kind, **acts)
    names = ("backward_updates", "overrun_bytes", "step_misses")
    try:
        run, counts = trained(kind, **acts)
    except RuntimeError as error:
        return {"same": False, "error": str(error), **dict.fromkeys(names, -1)}
    return {"same": run.outcome() == expected, **{name: counts[name] for name in names}}


def broken(acts: dict[str, Act], place: str = "before") -> dict[str, Any]:
    """Train, and run each of these acts in one step, one after another. Return their errors, each with the
    marked line of its act, and the errors of what user code tries next.

    Each act leaves everything as it was. Without an error, the next act would not be refused either.
    """
    run = BackwardTraining(partial(torch.compile, backend="teraio", options=OPTIONS))
    found: dict[str, Any] = {}

    def act_and_stop(_: BackwardTraining) -> None:
        for name, act in acts.items():
            text = _error_of(lambda act=act: act(run))  # type: ignore[misc]
            assert engine.ENGINE is not None
            is_torn = engine.ENGINE.residency.torn is not None
            found[name] = {"error": text, "line": _broken_line(act), "torn": is_torn}
        raise KeyError("stop")

    setattr(run, place, act_and_stop)
    with contextlib.suppress(KeyError):
        run.train(nothing)
    found["updates"] = teraio.stats()["backward_updates"]
    run.before = run.after = nothing
    found["again"] = _error_of(run.step)
    found["reset"] = _error_of(teraio.reset)
    return found


@contextlib.contextmanager
def replaced(owner: Any, name: Any, value: Any) -> Iterator[None]:
    """Replace an attribute or an item in the `with` block."""
    get, put = (getattr, setattr) if isinstance(name, str) and not isinstance(owner, dict) else _ITEM
    before = get(owner, name)
    put(owner, name, value)
    try:
        yield
    finally:
        put(owner, name, before)


_ITEM: Any = operator.getitem, operator.setitem


def _error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _broken_line(*acts: Any) -> str:
    """Return the file and line of the first marked line in the code of these acts."""
    for act in acts:
        lines, first = inspect.getsourcelines(act)
        for at, line in enumerate(lines):
            if BROKEN in line:
                return f"{Path(__file__).name}:{first + at}"
    return ""


# ---- code that breaks an assumption


def clip(run: BackwardTraining) -> None:
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)  # this line breaks an assumption


def clip_by_value(run: BackwardTraining) -> None:
    torch.nn.utils.clip_grad_value_(run.model.parameters(), 1.0)  # this line breaks an assumption


def scale(run: BackwardTraining) -> None:
    gradient: Any = run.weight().grad
    gradient.mul_(0.5)  # this line breaks an assumption


def read_weight(run: BackwardTraining) -> None:
    run.weight().detach().sum()  # this line breaks an assumption


def read_gradient(run: BackwardTraining) -> None:
    gradient: Any = run.weight().grad
    gradient.sum()  # this line breaks an assumption


def read_state(run: BackwardTraining) -> None:
    run.optimizer.state[run.weight()]["exp_avg"].sum()  # this line breaks an assumption


def read_counter(run: BackwardTraining) -> None:
    run.optimizer.state[run.weight()]["step"].item()  # this line breaks an assumption


def read_in_thread(run: BackwardTraining) -> None:
    thread = threading.Thread(target=lambda: _error_of(lambda: run.weight().detach().sum()))
    thread.start()
    thread.join()


def read_pointer(run: BackwardTraining) -> None:
    run.weight().data_ptr()  # this line breaks an assumption


def write_weight(run: BackwardTraining) -> None:
    with torch.no_grad():
        run.weight().mul_(0.5)  # this line breaks an assumption


def save(run: BackwardTraining) -> None:
    torch.save(run.model.state_dict(), io.BytesIO())  # this line breaks an assumption


def change_rate(run: BackwardTraining) -> None:
    with replaced(run.optimizer.param_groups[0], "lr", 0.5):
        run.optimizer.step()  # this line breaks an assumption


def change_betas(run: BackwardTraining) -> None:
    with replaced(run.optimizer.param_groups[0], "betas", (0.5, 0.5)):
        run.optimizer.step()  # this line breaks an assumption


def replace_gradient(run: BackwardTraining) -> None:
    with replaced(run.weight(), "grad", torch.full((WIDTH, WIDTH), 0.1)):
        run.optimizer.step()  # this line breaks an assumption


def forget_gradient(run: BackwardTraining) -> None:
    with replaced(run.weight(), "grad", None):
        run.optimizer.step()  # this line breaks an assumption


def replace_data(run: BackwardTraining) -> None:
    with replaced(run.weight(), "data", torch.full((WIDTH, WIDTH), 0.1)):
        run.optimizer.step()  # this line breaks an assumption


def replace_state(run: BackwardTraining) -> None:
    with replaced(run.optimizer.state[run.weight()], "exp_avg", torch.full((WIDTH, WIDTH), 0.1)):
        run.optimizer.step()  # this line breaks an assumption


def clear_states(run: BackwardTraining) -> None:
    with replaced(run.optimizer.state, run.weight(), {}):
        run.optimizer.step()  # this line breaks an assumption


def replace_groups(run: BackwardTraining) -> None:
    groups = [{**group} for group in run.optimizer.param_groups]
    with replaced(run.optimizer, "param_groups", groups):
        run.optimizer.step()  # this line breaks an assumption


def accumulate(run: BackwardTraining) -> None:
    run.call(torch.ones(ROWS, WIDTH)).backward()  # this line breaks an assumption


def evaluate(run: BackwardTraining) -> None:
    with torch.no_grad():
        run.call(torch.ones(ROWS, WIDTH))  # this line breaks an assumption


def step_with_closure(run: BackwardTraining) -> None:
    run.optimizer.step(lambda: torch.zeros(()))  # this line breaks an assumption


def step_in_autocast(run: BackwardTraining) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        run.optimizer.step()  # this line breaks an assumption


def step_by_scaler(run: BackwardTraining) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    scaler.step(run.optimizer)  # this line breaks an assumption


def step_of_another(run: BackwardTraining) -> None:
    torch.optim.AdamW(run.model.parameters(), lr=1e-2).step()  # this line breaks an assumption


def step_again(run: BackwardTraining) -> None:
    run.optimizer.step()  # this line breaks an assumption


def zero_in_place(run: BackwardTraining) -> None:
    run.optimizer.zero_grad(set_to_none=False)  # this line breaks an assumption


def scale_in_hook(run: BackwardTraining) -> None:
    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        gradient: Any = run.weight().grad
        gradient.mul_(0.5)  # this line breaks an assumption

    with run.optimizer.register_step_pre_hook(halve):
        run.optimizer.step()


def skips_step() -> dict[str, Any]:
    """Do not step, as if the loss was infinite. The next forward detects it. Then reset teraio."""
    run, _ = _stopped_before_step()
    run.before = nothing
    error = _error_of(run.step)
    reset = _error_of(teraio.reset)
    gradient = run.weight().grad
    assert gradient is not None
    return {"error": error, "reset": reset, "nan": bool(gradient.isnan().all())}


def _stopped_before_step() -> tuple[BackwardTraining, BaseException]:
    run = BackwardTraining(partial(torch.compile, backend="teraio", options=OPTIONS))

    def stop(_: BackwardTraining) -> None:
        raise KeyError("stop")

    run.before = stop
    try:
        run.train(nothing)
    except KeyError as error:
        return run, error
    raise AssertionError("the training was not stopped")


# ---- loops that keep to the assumptions


class HookTraining(BackwardTraining):
    """A training that steps each weight in the backward, by an optimizer of its own."""

    def __init__(self, compile_: Callable[[torch.nn.Module], Any]) -> None:
        super().__init__(compile_)
        own = {p: torch.optim.AdamW([p], lr=1e-2) for p in self.model.parameters()}
        self.own = own

        def step(p: torch.Tensor) -> None:
            own[p].step()  # type: ignore[index]
            own[p].zero_grad()  # type: ignore[index]

        for p in own:
            p.register_post_accumulate_grad_hook(step)

    def step(self) -> None:
        loss = self.loss()
        loss.backward()
        self.step_number += 1
        self.seen.append(loss.item())

    def outcome(self) -> list[Any]:
        states = [v for p, optimizer in self.own.items() for v in optimizer.state[p].values()]
        return [self.seen, *(t.detach().numpy().tobytes() for t in (*self.own, *states))]


def steps_in_hooks(updates: str) -> dict[str, Any]:
    with patch.dict(os.environ, {"TERAIO_DISABLE": "1"}):
        plain = HookTraining(partial(torch.compile, backend="teraio", options={"inner": "eager"}))
        plain.train(nothing)
        expected = plain.outcome()
    run = HookTraining(partial(torch.compile, backend="teraio", options={**OPTIONS, "updates": updates}))
    run.train(nothing)
    counts = dict(teraio.stats())
    names = ("backward_updates", "owed_updates", "late_updates", "settled_updates", "step_misses")
    return {**{name: counts[name] for name in names}, "same": run.outcome() == expected}


class AccumulatingTraining(BackwardTraining):
    """A training with two backwards per step."""

    def loss(self) -> torch.Tensor:
        super().loss().backward()
        return super().loss()


class AddingTraining(BackwardTraining):
    """A training whose loss has one weight in eager code, too. Autograd adds the weight's two gradients."""

    def loss(self) -> torch.Tensor:
        return super().loss() + 0.1 * self.weight().square().sum()


def plain_loop() -> dict[str, Any]:
    return compared()


def evicted_before_step() -> dict[str, Any]:
    """Evict all tensors before `step()`, so that withheld bytes are written to the drive."""
    kinds: set[str] = set()

    def evict(run: BackwardTraining) -> None:
        if engine.ENGINE is None:
            return
        residency = engine.ENGINE.residency
        kinds.update(r.kind for r in residency.records.values() if r.state is State.WITHHELD)
        residency.advance_slot()
        residency.evict_until_fits(2**40, None)
        assert not any(r.state is State.WITHHELD for r in residency.records.values())

    return {**compared(before=evict), "withheld": sorted(kinds)}


def schedules_rates() -> dict[str, Any]:
    def halve(run: BackwardTraining) -> None:
        run.optimizer.param_groups[0]["lr"] *= 0.5
        run.seen.append(run.weight().detach().sum().item())
        torch.save(run.optimizer.state_dict(), io.BytesIO())

    return compared(after=halve)


def interrupted() -> dict[str, Any]:
    """Send Ctrl-C in a backward that has run updates. It must interrupt the loop after `step()`."""
    expected = plain_outcome()
    run = BackwardTraining(partial(torch.compile, backend="teraio", options=OPTIONS))
    found: list[int] = []
    real = late_step.make_late_stand_in

    def interrupt(*given: Any) -> Any:
        if run.step_number == BREAKS and not found:
            found.append(run.step_number)
            signal.raise_signal(signal.SIGINT)
        return real(*given)

    stopped = ""
    with patch.object(late_step, "make_late_stand_in", interrupt):
        try:
            run.train(nothing)
        except KeyboardInterrupt:
            stopped = f"step {run.step_number}"
            run.optimizer.zero_grad()
            run.step_number += 1
            run.seen.append(0.0)
    error = _error_of(partial(run.train, nothing))
    return {"stopped": stopped, "same": not error and run.outcome()[1:] == expected[1:], "error": error}


def failing_code() -> dict[str, Any]:
    """Let the optimizer's code fail inside of an update in the backward."""
    real = late_step.make_late_stand_in

    def fail(*given: Any) -> Any:
        if engine.ENGINE is not None and len(engine.ENGINE.late.backward.pending) == 2:
            raise ValueError("planted")
        return real(*given)

    with patch.object(late_step, "make_late_stand_in", fail):
        text = _error_of(trained)
    return {"error": text, "reset": _error_of(teraio.reset)}


LOOKS: dict[str, Act] = {
    "reads in a thread": read_in_thread,  # the first, so that `torn` is its effect
    "clips": clip,
    "clips by value": clip_by_value,
    "scales": scale,
    "reads a weight": read_weight,
    "reads a gradient": read_gradient,
    "reads a state": read_state,
    "reads a counter": read_counter,
    "reads a pointer": read_pointer,
    "writes a weight": write_weight,
    "saves": save,
    "accumulates": accumulate,
    "evaluates": evaluate,
    "steps by a GradScaler": step_by_scaler,
    "scales in a hook": scale_in_hook,
}
CHANGES: dict[str, Act] = {
    "changes a rate": change_rate,
    "changes betas": change_betas,
    "replaces a gradient": replace_gradient,
    "forgets a gradient": forget_gradient,
    "replaces data": replace_data,
    "replaces a state": replace_state,
    "clears states": clear_states,
    "replaces groups": replace_groups,
    "steps with a closure": step_with_closure,
    "steps in autocast": step_in_autocast,
    "steps by another optimizer": step_of_another,
}
AFTER: dict[str, Act] = {
    "reads a gradient": read_gradient,
    "zeroes in place": zero_in_place,
    "steps again": step_again,
}
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain loop": plain_loop,
    "accumulates in each step": partial(compared, AccumulatingTraining),
    "adds in eager code": partial(compared, AddingTraining),
    "steps in hooks": partial(steps_in_hooks, "backward"),
    "owes in hooks": partial(steps_in_hooks, "late"),
    "evicted before the step": evicted_before_step,
    "schedules rates": schedules_rates,
    "interrupted": interrupted,
    "failing code": failing_code,
    "skips the step": skips_step,
    "breaks an assumption": partial(broken, LOOKS | CHANGES),
    "looks after the step": partial(broken, AFTER, "after"),
}
assert STEPS > BREAKS + 1

if __name__ == "__main__":
    if "--list" in sys.argv:
        print("\n".join(CASES))
    else:
        run_cases(CASES)
