"""Gradients leave as soon as a backward has made them, and are there again when autograd adds to them.

    backward runs    a gradient is made: it may leave at any later slot
    autograd         takes the storage over, evicted or not (the first of a step), or adds, by an operator
                     `register_under_lock`: the weight has its gradient

If other programs use the same weight, autograd adds their gradients up on the way: they would come back at
once, so they stay until that is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.autograd import _get_sequence_nr

from teraio import switches
from teraio.formats.schedule import Buffer

from ..ledger.engine_lock import EngineLock
from ..ledger.record import Record
from ..ledger.residency import Residency
from ..step.program import Program
from .user_code import UserCode

AGAIN = "_recomputation_hook"  # of torch.utils.checkpoint

FORGOTTEN_AFTER = 2  # steps: a forward that no backward came for, whose results are gone


@dataclass
class OpenForward:
    """A forward whose backward may still come: while one of the tensors is alive that it saved. If no one can
    see those, it may come until it has, or its results are gone and steps went by."""

    number: int  # autograd's, of the node that is its backward
    weights: frozenset[int]  # keys of the records of those that are trained
    saved: list[Record]
    results: list[Record]
    steps: int = 0  # that have ended since


class Gradients:
    def __init__(
        self,
        residency: Residency,
        user: UserCode,
        adopt: Callable[[Record, torch.Tensor], Record | None],
        lock: EngineLock,
    ) -> None:
        self.residency = residency
        self.user = user
        self.adopt = adopt
        self.lock = lock
        self.is_off = "early_gradients" in switches.disabled_features()
        self.forwards: list[OpenForward] = []
        self.leaves: list[Any] = []  # of the backward that runs: what each edge of its node leads to
        self.made: dict[int, Record] = {}  # by it, and free to leave
        self.backward = -1  # autograd's number of it
        self.number = -1  # and of the node of the forward that runs
        self.shared: dict[int, set[int]] = {}  # backward -> weights whose gradients it adds up

    # ---- programs

    def begin_call(self, program: Program) -> None:
        """A program begins."""
        self.leaves, self.made = [], {}
        self.number = _get_sequence_nr() - 1  # the node is made before its forward runs
        self.backward = torch._C._current_graph_task_id()
        if self.backward < 0:
            self.shared.clear()
        if program.schedule.kind != "backward" or not program.schedule.edges:
            return
        if self.user.weights_stay or torch.is_anomaly_enabled() or torch.is_grad_enabled():
            return  # they are read at once: by collectives, the search for NaN, a graph of the backward
        node = torch._C._current_autograd_node()
        edges = [target for target, _ in node.next_functions if target is not None] if node else []
        self._note_shared_weights()
        if len(edges) == program.schedule.edges:
            self.leaves = [getattr(target, "variable", None) for target in edges]

    def _note_shared_weights(self) -> None:
        """Weights that several forwards used whose backward may still come belong to all of them until this
        backward is over."""
        uses = Counter(
            key for forward in self.forwards if self._can_have_backward(forward) for key in forward.weights
        )
        shared = self.shared.setdefault(self.backward, set())
        shared.update(key for key, count in uses.items() if count > 1)

    def add_open_forward(self, program: Program) -> None:
        """Its backward may come."""
        self.forwards = [forward for forward in self.forwards if self._can_have_backward(forward)]
        packer = saved_tensors_hook_name()
        if packer.startswith(AGAIN):
            return  # a checkpoint makes what was saved once more: that node is no one's
        weights: set[int] = set()
        found: dict[str, list[Record]] = {"saved": [], "result": [], "argument": []}
        for about, record in zip(program.schedule.buffers, program.bound):
            if record is not None:
                found[about.role].append(record)
                if record.kind == "weight" and _is_trained(record):
                    weights.add(record.key)
        if weights:
            saved: list[Record] = [] if packer else found["saved"]  # what is packed is theirs
            self.forwards.append(OpenForward(self.number, frozenset(weights), saved, found["result"]))

    def age_open_forwards(self) -> None:
        for forward in self.forwards:
            forward.steps += 1

    def release_gradients_to_autograd(self, outputs: Sequence[Any]) -> None:
        """Autograd, and the user's hooks, get what it made."""
        for tensor in outputs:
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                record = self.made.get(tensor.untyped_storage()._cdata)
                if record is not None:
                    self.residency.reachable[record.key] = record
                    self.user.known_tensors.add(tensor, record)
        node = torch._C._current_autograd_node()
        if node is not None and not torch._C._autograd._get_current_graph_task_keep_graph():
            number = node._sequence_nr()
            self.forwards = [forward for forward in self.forwards if forward.number != number]
        self.leaves, self.made = [], {}

    def weight_of_early_gradient(self, edge: int, gradient: torch.Tensor) -> Record | None:
        """Whose gradient it is, if it may leave before autograd has given it over."""
        weight = self.weight_of_early_edge(edge)
        if weight is None or gradient.dtype != self.leaves[edge].dtype:
            return None
        return weight if gradient.untyped_storage().nbytes() == self.leaves[edge].nbytes else None

    def is_evictable_early(self, about: Buffer) -> bool:
        """Whether this result of the backward that runs may leave before it returns."""
        return self.weight_of_early_edge(about.edge) is not None

    def weight_of_early_edge(self, edge: int) -> Record | None:
        leaf = self.leaves[edge] if 0 <= edge < len(self.leaves) else None
        weight = self._weight_record_of(leaf)
        if self.is_off or leaf is None or weight is None or id(leaf) not in HOOKED:
            return None
        return None if weight.key in self.shared.get(self.backward, ()) else weight

    def _weight_record_of(self, tensor: Any) -> Record | None:
        record = self.user.known_tensors.records.get(id(tensor))
        return record if record is not None and record.kind == "weight" else None

    def _can_have_backward(self, forward: OpenForward) -> bool:
        known = self.residency.records
        seen = forward.saved or forward.results
        if any(known.get(record.key) is record for record in seen):
            return True
        return not forward.saved and forward.steps <= FORGOTTEN_AFTER

    # ---- accumulation

    def watch_gradient_of_weight(self, tensor: torch.Tensor) -> None:
        """This weight's gradients are seen from now on."""
        if id(tensor) in HOOKED or not (tensor.requires_grad and tensor.is_leaf):
            return
        if type(tensor) is torch.nn.Parameter and not self.user.weights_stay:
            _hook_gradient_accumulation(tensor)

    def watch_and_register_gradient(self, tensor: torch.Tensor) -> None:
        """The weight may have its gradient already."""
        self.watch_gradient_of_weight(tensor)
        self.register_gradient_of(tensor)

    def register_gradient_of(self, tensor: torch.Tensor) -> None:
        """The weight has its gradient."""
        gradient = tensor.grad
        if (weight := self._weight_record_of(tensor)) is None or gradient is None or self.user.weights_stay:
            return
        if type(gradient) is torch.Tensor and gradient.layout == torch.strided:
            before = len(self.residency.records)
            record = self.adopt(weight, gradient)
            if record is not None and len(self.residency.records) > before:
                self.user.eager_memory.note_bytes_entering_ledger(record.size_bytes)


def saved_tensors_hook_name() -> str:
    """Who packs what is saved now, if someone does."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return "" if hooks is None else getattr(hooks[0], "__qualname__", "a hook")


def _is_trained(weight: Record) -> bool:
    with DisableTorchFunctionSubclass():
        return any(face.requires_grad for face in weight.live_known_tensors())


# ---- hooks

ACTIVE: list[Gradients] = []  # of the engine of this process, if there is one
HOOKED: dict[int, ReferenceType[torch.Tensor]] = {}  # weights by their id; a hook stays with its weight


def _hook_gradient_accumulation(tensor: torch.Tensor) -> None:
    key = id(tensor)
    weight = ref(tensor, lambda _: HOOKED.pop(key, None) and None)
    HOOKED[key] = weight

    def register_under_lock(owner: torch.Tensor) -> None:
        if ACTIVE:
            with ACTIVE[0].lock:
                ACTIVE[0].register_gradient_of(owner)

    handle = tensor.register_post_accumulate_grad_hook(register_under_lock)
    _put_hook_first(tensor._post_accumulate_grad_hooks, handle.id)


def _put_hook_first(hooks: dict[int, Any], key: int) -> None:
    """Before those of the user's that were there: they may take the gradient away. Torch goes through it in
    C++, by when each was put in."""
    for other in [other for other in hooks if other != key]:
        hooks[other] = hooks.pop(other)
