"""Bugs of late updates, updates in the backward, owed scalings and remembered norms, to plant. A random loop
must detect each bug.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch

from teraio.runtime.engine import backward_updates
from teraio.runtime.engine.late_updates import LateUpdate, LateUpdates
from teraio.runtime.ledger.owed_tensors import OwedTensors
from teraio.runtime.optimizer import late_step
from teraio.runtime.optimizer.backward_step import BackwardStep
from teraio.runtime.step.program import Program
from teraio.runtime.torch_extension.observer import Observer

RUN = LateUpdates._run_resident
UPDATER, PLACES_OF = BackwardStep._updater, backward_updates._Places.of
COPY_OPTIONS = late_step.copy_of_options
SCALE, ANSWER = Observer.scale_block, Observer.answer_from_block


def _changed_run(change: Callable[[LateUpdate], None]) -> Any:
    def run(self: LateUpdates, update: LateUpdate) -> None:
        change(update)
        RUN(self, update)

    return patch.object(LateUpdates, "_run_resident", run)


def _run_twice(update: LateUpdate) -> None:
    own = update.run
    update.run = lambda blocks: (own(blocks), own(blocks))[0]


def _run_never(update: LateUpdate) -> None:
    update.run = lambda blocks: None


def _drop_gradients(update: LateUpdate) -> None:
    """Write other values into the gradients, as if their memory was used for other tensors."""
    own, gradients = update.run, [t for t, r in zip(update.tensors, update.records) if r.kind == "grad"]

    def run(blocks: Mapping[int, Any]) -> None:
        for gradient in gradients:
            storage = gradient.untyped_storage()
            block = blocks.get(storage._cdata, storage)
            torch.empty(0, dtype=gradient.dtype).set_(block).fill_(0.5)
        own(blocks)

    update.run = run


PLANTS: dict[str, Callable[[], list[Any]]] = {
    "updates run twice": lambda: [_changed_run(_run_twice)],
    "updates are lost": lambda: [_changed_run(_run_never)],
    "gradients are dropped": lambda: [_changed_run(_drop_gradients)],
    "later options are used": lambda: [patch.object(late_step, "copy_of_options", lambda group: group)],
    "replaced states are used": lambda: [patch.object(late_step, "shadows_of_states", lambda states: states)],
    "looks settle nothing": lambda: [
        patch.object(OwedTensors, "settle_storages", lambda self, keys, place, may_evict=True: None),
        patch.object(OwedTensors, "settle_records", lambda self, records, place: None),
    ],
    "saves settle nothing": lambda: [
        patch.object(OwedTensors, "settle_records", lambda self, records, place: None)
    ],
    "versions are not raised": lambda: [
        patch.object(late_step, "set_versions", lambda tensors, versions: None)
    ],
}


def _copy_of(block: Any) -> Any:
    copied = torch.UntypedStorage(block.nbytes())
    copied.copy_(block)
    return copied


def _as_numbers(block: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32).set_(block)


def _lose_scalings(self: Observer, storage: Any, block: Any, withheld: bool) -> None:
    SCALE(self, storage, _copy_of(block), withheld)


def _scale_twice(self: Observer, storage: Any, block: Any, withheld: bool) -> None:
    before = _as_numbers(_copy_of(block))
    SCALE(self, storage, block, withheld)
    after = _as_numbers(block)
    after.copy_((after * after / before).nan_to_num(0.0))


def _answer_from_first_step(blocks: dict[str, Any]) -> Callable[[Observer, Any, Any], None]:
    def answer(self: Observer, storage: Any, block: Any) -> None:
        first = blocks.setdefault(f"{block.nbytes()}", _copy_of(block))
        ANSWER(self, storage, _copy_of(first))

    return answer


GRADIENT_PLANTS: dict[str, Callable[[], list[Any]]] = {
    "scalings are lost": lambda: [patch.object(Observer, "scale_block", _lose_scalings)],
    "scalings run twice": lambda: [patch.object(Observer, "scale_block", _scale_twice)],
    "norms are of an earlier step": lambda: [
        patch.object(Observer, "answer_from_block", _answer_from_first_step({}))
    ],
    "updates do not wait for scalings": lambda: [
        patch.object(Observer, "set_may_owe", lambda self, key, may: None)
    ],
}


def _run_backward_twice(self: BackwardStep, *given: Any) -> Any:
    run = UPDATER(self, *given)
    return lambda blocks: (run(blocks), run(blocks))[0]


def _run_backward_never(self: BackwardStep, *given: Any) -> Any:
    UPDATER(self, *given)
    return lambda blocks: None


def _places_of_gradients(program: Program) -> Any:
    places = PLACES_OF(program)
    return backward_updates._Places(places.made, {})


def _copy_of_first_options(copies: dict[int, Any]) -> Callable[[Any], Any]:
    return lambda group: copies.setdefault(id(group), COPY_OPTIONS(group))


BACKWARD_PLANTS: dict[str, Callable[[], list[Any]]] = {
    "updates in the backward run twice": lambda: [
        patch.object(BackwardStep, "_updater", _run_backward_twice)
    ],
    "updates in the backward are lost": lambda: [patch.object(BackwardStep, "_updater", _run_backward_never)],
    "updates do not wait for uses": lambda: [
        patch.object(backward_updates._Places, "of", _places_of_gradients)
    ],
    "first options are used": lambda: [
        patch.object(late_step, "copy_of_options", _copy_of_first_options({}))
    ],
    "versions are not raised at step()": lambda: [
        patch.object(BackwardStep, "raise_versions", lambda self: None)
    ],
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for change in (PLANTS | GRADIENT_PLANTS | BACKWARD_PLANTS)[name]() if name else ():
            stack.enter_context(change)
        yield
