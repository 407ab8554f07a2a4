"""Gradients. They are evictable as soon as a backward has made them, and resident when autograd adds to them.

    backward runs    the backward makes a gradient, which the engine may evict at any later slot
    autograd         takes over the storage, evicted or not, if the gradient is the first of its step;
                     otherwise adds to the first gradient by an operator, for which the engine fetches it
    hook             `register_under_lock` registers the gradient that the weight now has

If several forwards use one weight, autograd sums their gradients during the backward. An evicted gradient
would immediately be fetched for the sum. So gradients of such a weight are evicted only after the sum.
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

RECOMPUTATION_HOOK = "_recomputation_hook"  # name of the hook of torch.utils.checkpoint

# After this number of steps, the engine forgets a forward, if the forward's results are freed and the engine
# never saw its saved tensors.
FORGOTTEN_AFTER = 2


@dataclass
class OpenForward:
    """A forward whose backward may still run.

    The backward may run while any tensor that the forward saved is alive. If the engine sees no saved tensor,
    it makes two assumptions. (1) The backward may run while a result of the forward is alive. (2) In any
    case, the backward may run until FORGOTTEN_AFTER steps have ended.
    """

    number: int  # autograd's sequence number of the backward's node
    weights: frozenset[int]  # keys of the trained weights' records
    saved: list[Record]
    results: list[Record]
    steps: int = 0  # steps that have ended since the forward


class Gradients:
    """The forwards whose backward may still run, and the gradients that the running backward has made."""

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
        self.leaves: list[Any] = []  # one leaf tensor per edge of the running backward's node
        self.made: dict[int, Record] = {}  # evictable gradients of the running backward
        self.backward = -1  # autograd's number of the running backward; negative without a backward
        self.number = -1  # autograd's sequence number of the running forward's node
        # Number of a backward -> keys of the weights whose gradients the backward sums.
        self.shared: dict[int, set[int]] = {}

    # ---- programs

    def begin_call(self, program: Program) -> None:
        """Begin a call. If the call is a backward, find the leaf tensor of each gradient that the backward
        will return."""
        self.leaves, self.made = [], {}
        self.number = _get_sequence_nr() - 1  # autograd makes the backward's node before the forward runs
        self.backward = torch._C._current_graph_task_id()
        if self.backward < 0:
            self.shared.clear()
        if program.schedule.kind != "backward" or not program.schedule.edges:
            return
        if self.user.keeps_weights or torch.is_anomaly_enabled() or torch.is_grad_enabled():
            return  # collectives, anomaly mode or a graph of the backward read gradients immediately
        node = torch._C._current_autograd_node()
        edges = [target for target, _ in node.next_functions if target is not None] if node else []
        self._note_shared_weights()
        if len(edges) == program.schedule.edges:
            self.leaves = [getattr(target, "variable", None) for target in edges]

    def _note_shared_weights(self) -> None:
        """Record the weights that several open forwards use, because this backward may sum the gradients of
        such a weight."""
        uses = Counter(
            key for forward in self.forwards if self._can_have_backward(forward) for key in forward.weights
        )
        shared = self.shared.setdefault(self.backward, set())
        shared.update(key for key, count in uses.items() if count > 1)

    def note_made(self, record: Record) -> None:
        """Record a gradient that the running backward has made and that may be evicted."""
        self.made[record.key] = record

    def add_open_forward(self, program: Program) -> None:
        """Add the forward that has just run, because its backward may run later."""
        self.forwards = [forward for forward in self.forwards if self._can_have_backward(forward)]
        packer = saved_tensors_hook_name()
        if packer.startswith(RECOMPUTATION_HOOK):
            return  # a checkpoint recomputes this forward, and no backward runs the forward's node
        weights: set[int] = set()
        found: dict[str, list[Record]] = {"saved": [], "result": [], "argument": []}
        for about, record in zip(program.schedule.buffers, program.bound):
            if record is not None:
                found[about.role].append(record)
                if record.kind == "weight" and _is_trained(record):
                    weights.add(record.key)
        if weights:
            # Hooks pack saved tensors unseen by the engine.
            saved: list[Record] = [] if packer else found["saved"]
            self.forwards.append(OpenForward(self.number, frozenset(weights), saved, found["result"]))

    def age_open_forwards(self) -> None:
        for forward in self.forwards:
            forward.steps += 1

    def release_gradients_to_autograd(self, outputs: Sequence[Any]) -> None:
        """Let autograd and the user's hooks reach the gradients of the backward that ends. Close the forward
        of this backward, unless autograd keeps the graph."""
        for tensor in outputs:
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                record = self.made.get(tensor.untyped_storage()._cdata)
                if record is not None:
                    if record.evictable:  # user code inside the backward may have shared it with numpy
                        self.residency.make_reachable(record)
                    self.user.known_tensors.add(tensor, record)
        node = torch._C._current_autograd_node()
        if node is not None and not torch._C._autograd._get_current_graph_task_keep_graph():
            number = node._sequence_nr()
            self.forwards = [forward for forward in self.forwards if forward.number != number]
        self.leaves, self.made = [], {}

    def weight_of_early_gradient(self, edge: int, gradient: torch.Tensor) -> Record | None:
        """Return the weight of this gradient. Return None if the gradient may not be evicted before the
        backward returns."""
        weight = self.weight_of_early_edge(edge)
        if weight is None or gradient.dtype != self.leaves[edge].dtype:
            return None
        return weight if gradient.untyped_storage().nbytes() == self.leaves[edge].nbytes else None

    def is_evictable_early(self, about: Buffer) -> bool:
        """Return whether this result of the running backward may be evicted before the backward returns."""
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
        """Install the hook that registers this weight's gradients."""
        if id(tensor) in HOOKED or not (tensor.requires_grad and tensor.is_leaf):
            return
        if type(tensor) is torch.nn.Parameter and not self.user.keeps_weights:
            _hook_gradient_accumulation(tensor)

    def watch_and_register_gradient(self, tensor: torch.Tensor) -> None:
        """Install the hook on this weight, and register the gradient that the weight may already have."""
        self.watch_gradient_of_weight(tensor)
        self.register_gradient_of(tensor)

    def register_gradient_of(self, tensor: torch.Tensor) -> None:
        """Register the gradient that the weight has now."""
        gradient = tensor.grad
        if (weight := self._weight_record_of(tensor)) is None or gradient is None or self.user.keeps_weights:
            return
        if type(gradient) is torch.Tensor and gradient.layout == torch.strided:
            before = len(self.residency.records)
            record = self.adopt(weight, gradient)
            if record is not None and len(self.residency.records) > before:
                self.user.eager_memory.note_bytes_entering_ledger(record.size_bytes)


def saved_tensors_hook_name() -> str:
    """Return the name of the hook that packs saved tensors now, or an empty string without a hook."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return "" if hooks is None else getattr(hooks[0], "__qualname__", "a hook")


def _is_trained(weight: Record) -> bool:
    with DisableTorchFunctionSubclass():
        return any(face.requires_grad for face in weight.live_known_tensors())


# ---- hooks

ACTIVE: list[Gradients] = []  # the `Gradients` of this process's engine; empty without an engine


def set_active(gradients: Gradients | None) -> None:
    """Set the `Gradients` with which hooks register gradients. None means that this process's engine ends."""
    ACTIVE[:] = [] if gradients is None else [gradients]


# Weights with a hook, by id. A hook lives as long as its weight.
HOOKED: dict[int, ReferenceType[torch.Tensor]] = {}


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
    """Move this hook before the user's hooks, because the user's hooks may set the gradient to None.

    Torch calls the hooks from C++, in the order of insertion.
    """
    for other in [other for other in hooks if other != key]:
        hooks[other] = hooks.pop(other)
