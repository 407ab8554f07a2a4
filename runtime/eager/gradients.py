"""Gradients: the engine may evict them as soon as a backward has made them, and fetches them for autograd's
sums.

    backward runs    makes a gradient. The engine may evict this gradient at any later slot.
    autograd         makes the first gradient of a step the weight's `.grad`, even while the gradient is
                     evicted. An operator adds each later gradient to the first. The engine fetches both
                     gradients for this operator.
    hook             `register_under_lock` registers the tensor that is now the weight's `.grad`

If several forwards use one weight, autograd sums the weight's gradients during the backward. After an
eviction, the engine would immediately fetch these gradients for the sum. So the gradients of such a weight
are evicted only after the sum.
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
from ..ledger.shards import is_shard, local_tensor
from ..step.program import Program
from .user_code import UserCode

RECOMPUTATION_HOOK = "_recomputation_hook"  # the hook with which torch.utils.checkpoint recomputes a forward

# If the engine knows no tensor that a forward saved, it forgets the forward after this number of steps. It
# does not forget the forward while a result of the forward is alive.
FORGOTTEN_AFTER = 2


@dataclass(frozen=True, slots=True)
class WholeGradient:
    """A gradient that one backward has made alone. Autograd has added nothing to it.

    order    identities of the step's programs up to this backward
    """

    record: Record
    order: tuple[str, ...]


@dataclass
class OpenForward:
    """A forward whose backward may still run.

    The backward may run while any tensor that the forward saved is alive. The engine may know no saved
    tensor. In that case the backward may run while a result of the forward is alive, and in any case until
    FORGOTTEN_AFTER steps have ended.
    """

    number: int  # autograd's sequence number of the backward's node
    weights: frozenset[int]  # keys of the records of weights that are trained
    saved: list[Record]
    results: list[Record]
    steps: int = 0  # number of steps that have ended since the forward


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
        self.leaves: list[Any] = []  # the weight of each gradient that the running backward returns
        self.made: dict[int, Record] = {}  # gradients that the running backward has made and may be evicted
        self.backward = -1  # autograd's number of the running backward; negative if no backward runs
        self.number = -1  # autograd's sequence number of the running forward's backward node
        # Number of a backward -> keys of the weights whose gradients the backward may sum.
        self.shared: dict[int, set[int]] = {}
        # Gradients of this step that a backward has returned, with their versions, by storage key.
        self.returned: dict[int, tuple[WholeGradient, int]] = {}
        self.whole: dict[int, WholeGradient] = {}  # by storage key of the weight

    # ---- programs

    def begin_call(self, program: Program) -> None:
        """Begin a call of a program. If the program is a backward, find the weight (autograd's leaf tensor)
        of each gradient that the backward will return."""
        self.leaves, self.made = [], {}
        self.number = _get_sequence_nr() - 1  # autograd has just made the node, before the forward runs
        self.backward = torch._C._current_graph_task_id()
        if self.backward < 0:
            self.shared.clear()
        if program.schedule.kind != "backward" or not program.schedule.edges:
            return
        if self.user.keeps_weights or torch.is_anomaly_enabled() or torch.is_grad_enabled():
            return  # collectives, anomaly mode and double backward read gradients as soon as they are made
        node = torch._C._current_autograd_node()
        edges = [target for target, _ in node.next_functions if target is not None] if node else []
        self._note_shared_weights()
        if len(edges) == program.schedule.edges:
            self.leaves = [getattr(target, "variable", None) for target in edges]

    def _note_shared_weights(self) -> None:
        """Record the weights that several forwards use whose backward may still run. For such a weight,
        autograd may sum several gradients in this backward."""
        uses = Counter(
            key for forward in self.forwards if self._can_have_backward(forward) for key in forward.weights
        )
        shared = self.shared.setdefault(self.backward, set())
        shared.update(key for key, count in uses.items() if count > 1)

    def note_made(self, record: Record) -> None:
        """Record that the running backward has made this gradient. The gradient may be evicted."""
        self.made[record.key] = record

    def add_open_forward(self, program: Program) -> None:
        """Record that this forward has just run, because its backward may run later."""
        self.forwards = [forward for forward in self.forwards if self._can_have_backward(forward)]
        packer = saved_tensors_hook_name()
        if packer.startswith(RECOMPUTATION_HOOK):
            return  # this run repeats a forward for a checkpoint; no backward runs the node of this run
        weights: set[int] = set()
        found: dict[str, list[Record]] = {"saved": [], "result": [], "argument": []}
        for about, record in zip(program.schedule.buffers[: program.own_buffers], program.bound):
            if record is not None:
                found[about.role].append(record)
                if record.kind == "weight" and self._is_trained(record):
                    weights.add(record.key)
        if weights:
            # If a hook packs the saved tensors, the engine does not know for how long they are alive.
            saved: list[Record] = [] if packer else found["saved"]
            self.forwards.append(OpenForward(self.number, frozenset(weights), saved, found["result"]))

    def age_open_forwards(self) -> None:
        for forward in self.forwards:
            forward.steps += 1
        self.returned.clear()
        self.whole.clear()

    def release_gradients_to_autograd(self, outputs: Sequence[Any], order: tuple[str, ...]) -> None:
        """End a backward: record that autograd and the user's hooks may now read its gradients. Forget the
        forward of this backward, unless autograd keeps the graph for another backward.

        `order` has the identities of the step's programs up to this backward.
        """
        for tensor in outputs:
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                record = self.made.get(tensor.untyped_storage()._cdata)
                if record is not None:
                    if record.evictable:  # False if user code in the backward has shared it with numpy
                        self.residency.make_reachable(record)
                    self.user.known_tensors.add(tensor, record)
                    if not tensor.is_inference():  # such a tensor has no version
                        self.returned[record.key] = WholeGradient(record, order), tensor._version
        node = torch._C._current_autograd_node()
        if node is not None and not torch._C._autograd._get_current_graph_task_keep_graph():
            number = node._sequence_nr()
            self.forwards = [forward for forward in self.forwards if forward.number != number]
        self.leaves, self.made = [], {}

    def weight_of_early_gradient(self, edge: int, gradient: torch.Tensor) -> Record | None:
        """Return the weight of this gradient if the gradient may be evicted before the backward returns.
        Otherwise return None."""
        weight = self.weight_of_early_edge(edge)
        if weight is None or gradient.dtype != self.leaves[edge].dtype:
            return None
        leaf_bytes = local_tensor(self.leaves[edge]).nbytes
        return weight if gradient.untyped_storage().nbytes() == leaf_bytes else None

    def is_evictable_early(self, about: Buffer) -> bool:
        """Return whether this output of the running backward may be evicted before the backward returns."""
        return self.weight_of_early_edge(about.edge) is not None

    def weight_of_early_edge(self, edge: int) -> Record | None:
        leaf = self.leaves[edge] if 0 <= edge < len(self.leaves) else None
        weight = self._weight_record_of(leaf)
        if self.is_off or leaf is None or weight is None or id(leaf) not in HOOKED:
            return None
        return None if weight.key in self.shared.get(self.backward, ()) else weight

    def _weight_record_of(self, tensor: Any) -> Record | None:
        record = None if tensor is None else self.user.known_tensors.record_of(tensor)
        return record if record is not None and record.kind == "weight" else None

    def _is_trained(self, weight: Record) -> bool:
        known = self.user.known_tensors
        with DisableTorchFunctionSubclass():
            return any(known.whole_of(face).requires_grad for face in weight.live_known_tensors())

    def _can_have_backward(self, forward: OpenForward) -> bool:
        known = self.residency.records
        seen = forward.saved or forward.results
        if any(known.get(record.key) is record for record in seen):
            return True
        return not forward.saved and forward.steps <= FORGOTTEN_AFTER

    # ---- accumulation

    def watch_gradient_of_weight(self, tensor: torch.Tensor) -> None:
        """Install the hook on this weight that registers its gradients, if the weight has no such hook."""
        if id(tensor) in HOOKED or not (tensor.requires_grad and tensor.is_leaf):
            return
        if (type(tensor) is torch.nn.Parameter or is_shard(tensor)) and not self.user.keeps_weights:
            _hook_gradient_accumulation(tensor)

    def watch_and_register_gradient(self, tensor: torch.Tensor) -> None:
        """Install the hook on this weight. If the weight already has a gradient, register the gradient."""
        self.watch_gradient_of_weight(tensor)
        self.register_gradient_of(tensor)

    def register_gradient_of(self, tensor: torch.Tensor) -> None:
        """Register the tensor that is now the weight's `.grad`, so that the engine may evict it."""
        gradient = tensor.grad
        if (weight := self._weight_record_of(tensor)) is None or gradient is None or self.user.keeps_weights:
            return
        gradient = local_tensor(gradient)
        self._note_whole(weight, gradient)
        if type(gradient) is torch.Tensor and gradient.layout == torch.strided:
            before = len(self.residency.records)
            record = self.adopt(weight, gradient)
            if record is not None and len(self.residency.records) > before:
                self.user.eager_memory.note_bytes_entering_ledger(record.size_bytes)

    def _note_whole(self, weight: Record, gradient: torch.Tensor) -> None:
        """Note whether one backward has made this gradient of the weight alone."""
        self.whole.pop(weight.key, None)
        if not self.returned or gradient.layout != torch.strided:
            return
        with DisableTorchFunctionSubclass():
            found, version = self.returned.pop(gradient.untyped_storage()._cdata, (None, -1))
        if found is None or found.record.is_dead() or gradient.is_inference():
            return
        if gradient._version == version:
            self.whole[weight.key] = found


def saved_tensors_hook_name() -> str:
    """Return the name of the hook that packs tensors saved for backward now, or "" without a hook."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return "" if hooks is None else getattr(hooks[0], "__qualname__", "a hook")


# ---- hooks

ACTIVE: list[Gradients] = []  # the `Gradients` object of this process's engine; empty without an engine


def set_active(gradients: Gradients | None) -> None:
    """Set the `Gradients` object that hooks call. None means that this process has no engine any more."""
    ACTIVE[:] = [] if gradients is None else [gradients]


# Weights that have the hook, by id. torch frees a hook together with its weight.
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
    """Move this hook before the user's hooks, because a user's hook may set the gradient to None.

    Torch calls the hooks in the order of their insertion into `hooks`.
    """
    for other in [other for other in hooks if other != key]:
        hooks[other] = hooks.pop(other)
