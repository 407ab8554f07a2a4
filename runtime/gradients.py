"""Gradients leave as soon as a backward has made them, and are there again when autograd adds to them.

    backward runs    a gradient is made: it may leave at any later slot
    autograd         before()   what it reads now is here: nothing where it takes the storage over, empty or
                                not (the first of a step), both where it adds
                     after()    the weight has its gradient: the guard is on, it may leave

Autograd reads in C++ and asks no one. So a gradient leaves before it is given over only if it is known who
reads it: the weight's accumulation alone. If other programs, or eager code, use the same weight, autograd
adds their gradients up on the way: then all of them stay until that is done.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.autograd import _get_sequence_nr

from teraio.schedule import Buffer

from .edges import added_up
from .guard import BARE
from .programs import Program
from .records import Record, sharers
from .residency import Residency
from .user_code import UserCode

AGAIN, CHECKPOINT = "_recomputation_hook", "_checkpoint_hook"  # of torch.utils.checkpoint

Counts = tuple[int, int]  # how often C++ and Python hold a gradient, as a hook sees it


FORGOTTEN_AFTER = 2  # steps: a forward that no backward came for, whose results are gone


@dataclass
class Forward:
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
        adopt: Callable[[Record, torch.Tensor, bool], Record | None],
    ) -> None:
        self.residency = residency
        self.user = user
        self.adopt = adopt
        self.forwards: list[Forward] = []
        self.leaves: list[Any] = []  # of the backward that runs: what each edge of its node leads to
        self.made: dict[int, Record] = {}  # by it, and free to leave
        self.unmet: list[Record] = []  # weights that no program had before this step
        self.backward = -1  # autograd's number of it
        self.number = -1  # and of the node of the forward that runs
        self.shared: dict[int, set[int]] = {}  # backward -> weights whose gradients it adds up
        # By the weight's id: which backward it is, and what is pinned until the weight has it added up.
        self.adding: dict[int, tuple[int, list[Record]]] = {}

    # ---- programs

    def enter(self, program: Program) -> None:
        """A program begins. What an exception left behind is let go of."""
        self.let_go()
        self.leaves, self.made = [], {}
        self.number = _get_sequence_nr() - 1  # the node is made before its forward runs
        self.backward = torch._C._current_graph_task_id()
        if self.backward < 0:
            self.shared.clear()
        if program.schedule.kind != "backward" or not program.schedule.edges:
            return
        if self.user.guard.off or torch.is_anomaly_enabled() or torch.is_grad_enabled():
            return  # someone reads gradients unseen: collectives, the search for NaN, a graph of the backward
        node = torch._C._current_autograd_node()
        edges = [target for target, _ in node.next_functions if target is not None] if node else []
        self._see_shared()
        if len(edges) == program.schedule.edges:
            self.leaves = [getattr(target, "variable", None) for target in edges]

    def backward_begins(self, outputs: Sequence[torch.Tensor]) -> None:
        """Look for weights whose gradients autograd adds up, among those that are new in this step.

        Eager code may have used such a weight before any program had it, which no guard has seen."""
        if self.unmet:
            with DisableTorchFunctionSubclass():
                leaves = added_up(outputs)
                for record in self.unmet:
                    record.edges_unseen |= any(id(face) in leaves for face in record.live_faces())

    def graph_of_backward(self) -> None:
        """Note that a backward has made a graph of itself: nodes made in C++ may hold any weight."""
        for record in self.residency.reachable.values():
            if record.kind == "weight":
                record.edges_unseen = True
                record.aliased |= record.shared()
                record.held |= record.holders() > 0

    def _see_shared(self) -> None:
        """Weights that several forwards used whose backward may still come belong to all of them until this
        backward is over."""
        uses = Counter(key for forward in self.forwards if self._open(forward) for key in forward.weights)
        shared = self.shared.setdefault(self.backward, set())
        shared.update(key for key, count in uses.items() if count > 1)

    def forward_ran(self, program: Program) -> None:
        """Its backward may come."""
        self.forwards = [forward for forward in self.forwards if self._open(forward)]
        packer = packing()
        if packer.startswith(AGAIN):
            return  # a checkpoint makes what was saved once more: that node is no one's
        weights: set[int] = set()
        found: dict[str, list[Record]] = {"saved": [], "result": [], "argument": []}
        for about, record in zip(program.schedule.buffers, program.bound):
            if record is not None:
                found[about.role].append(record)
                if record.kind == "weight" and _trained(record):
                    weights.add(record.key)
        if weights:
            saved: list[Record] = [] if packer else found["saved"]  # what is packed is theirs
            self.forwards.append(Forward(self.number, frozenset(weights), saved, found["result"]))

    def end_step(self) -> None:
        self.unmet.clear()
        for forward in self.forwards:
            forward.steps += 1

    def backward_ran(self, outputs: Sequence[Any]) -> None:
        """Autograd, and the user's hooks, get what it made."""
        for tensor in outputs:
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                record = self.made.get(tensor.untyped_storage()._cdata)
                if record is not None:
                    self.residency.reachable[record.key] = record
                    self.user.guard.watch(tensor, record, fresh=True)
                    record.version = record.versions()  # hooks may write into it before its weight has it
        node = torch._C._current_autograd_node()
        if node is not None and not torch._C._autograd._get_current_graph_task_keep_graph():
            number = node._sequence_nr()
            self.forwards = [forward for forward in self.forwards if forward.number != number]
        self.leaves, self.made = [], {}

    def early(self, edge: int, gradient: torch.Tensor) -> Record | None:
        """Whose gradient it is, if it may leave before autograd has given it over."""
        weight = self.leaves_early(edge)
        if weight is None or gradient.dtype != self.leaves[edge].dtype:
            return None
        return weight if gradient.untyped_storage().nbytes() == self.leaves[edge].nbytes else None

    def gives_early(self, about: Buffer) -> bool:
        """Whether this result of the backward that runs may leave before it returns."""
        return self.leaves_early(about.edge) is not None

    def leaves_early(self, edge: int) -> Record | None:
        leaf = self.leaves[edge] if 0 <= edge < len(self.leaves) else None
        weight = self._weight(leaf)
        if leaf is None or weight is None or weight.in_a_graph() or id(leaf) not in HOOKED:
            return None
        return None if weight.key in self.shared.get(self.backward, ()) else weight

    def _weight(self, tensor: Any) -> Record | None:
        record = self.user.guard.records.get(id(tensor))
        return record if record is not None and record.kind == "weight" else None

    def _open(self, forward: Forward) -> bool:
        known = self.residency.records
        seen = forward.saved or forward.results
        if any(known.get(record.key) is record for record in seen):
            return True
        return not forward.saved and forward.steps <= FORGOTTEN_AFTER

    # ---- accumulation

    def watch(self, tensor: torch.Tensor) -> None:
        """This weight's gradients are seen from now on."""
        if id(tensor) in HOOKED or not (tensor.requires_grad and tensor.is_leaf):
            return
        if BARE.get(type(tensor), type(tensor)) is torch.nn.Parameter and not self.user.guard.off:
            _hook(tensor)

    def before(self, tensor: torch.Tensor, gradient: torch.Tensor, counts: Counts) -> None:
        """Autograd adds this gradient: what it reads is here."""
        with DisableTorchFunctionSubclass():
            old = tensor.grad
            parts = [part for part in (old, gradient) if part is not None]
            records = [r for part in parts if (r := self._known(part)) is not None and r.evictable]
            if not records or (old is None and counts == TAKEN_OVER_AT and _fits(tensor, gradient)):
                return
            copied = gradient.nbytes if old is None else 0
        backward = torch._C._current_graph_task_id()
        self.let_go(backward)  # of one that was given to the caller, not to its weight
        self.user.bring(records, copied, "adding up")
        for record in records:
            record.pins += 1
        self.adding[id(tensor)] = (backward, records)

    def after(self, tensor: torch.Tensor) -> None:
        """The weight has its gradient."""
        self._adopt(tensor, taken_over=not self._let_go(id(tensor)))

    def watch_late(self, tensor: torch.Tensor) -> None:
        """The weight may have its gradient already."""
        self.watch(tensor)
        self._adopt(tensor, taken_over=False)

    def _adopt(self, tensor: torch.Tensor, taken_over: bool) -> None:
        weight = self._weight(tensor)
        gradient = tensor.grad
        if weight is None or gradient is None:
            return
        weight.edges_unseen = False
        plain = type(gradient).__name__ in {"Tensor", "GuardedTensor"} and gradient.layout == torch.strided
        if plain and not self.user.guard.off:
            before = len(self.residency.records)
            record = self.adopt(weight, gradient, taken_over)
            if record is not None and record.references() > SHARED_AFTER:
                record.aliased = True  # it is a view of what goes on through the graph, or a hook has it
            if record is not None and len(self.residency.records) > before:
                self.user.outside.took(record.size_bytes)
            if record is not None and record.evictable:
                self.user.guard.put_on([gradient])

    def _known(self, tensor: torch.Tensor) -> Record | None:
        if tensor.layout != torch.strided:
            return None
        record = self.user.guard.records.get(id(tensor))
        return record if record is not None else self.residency.records.get(tensor.untyped_storage()._cdata)

    def _let_go(self, tensor: int) -> bool:
        """Whether something was added up for this weight."""
        _, records = self.adding.pop(tensor, (0, ()))
        for record in records:
            record.pins -= 1
        return bool(records)

    def let_go(self, backward: int | None = None) -> None:
        """Of what no weight took."""
        for tensor, (number, _) in list(self.adding.items()):
            if backward is None or number == backward:
                self._let_go(tensor)


def packing() -> str:
    """Who packs what is saved now, if someone does."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return "" if hooks is None else getattr(hooks[0], "__qualname__", "a hook")


def packed(program: Program) -> list[Record]:
    """What a forward may have saved, or views of it, where someone reads that to pack it. Checkpoints keep or
    forget it as it is."""
    packer = packing()
    if program.schedule.kind != "forward" or not packer or packer.startswith((AGAIN, CHECKPOINT)):
        return []
    return [record for record in program.bound if record is not None and record.evictable]


def read_by_caller(program: Program) -> list[Record]:
    """As soon as it has returned, and perhaps later, by tensors that the guard does not see."""
    return program.given_records() + packed(program)


def _trained(weight: Record) -> bool:
    with DisableTorchFunctionSubclass():
        return any(face.requires_grad for face in weight.live_faces())


def _fits(tensor: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether the layout is the weight's, so that autograd need not copy it, and no hook comes after ours
    that could keep it."""
    hooks = tensor._backward_hooks or {}
    last = next(reversed(hooks.values()), None) if hooks else None
    return gradient.stride() == tensor.stride() and getattr(last, "teraio", False)


# ---- hooks

ACTIVE: list[Gradients] = []  # of the engine of this process, if there is one
HOOKED: dict[int, ReferenceType[torch.Tensor]] = {}  # weights by their id; a hook stays with its weight


def _hook(tensor: torch.Tensor) -> None:
    key = id(tensor)
    weight = ref(tensor, lambda _: HOOKED.pop(key, None) and None)
    HOOKED[key] = weight

    def before(gradient: torch.Tensor | None) -> None:
        if gradient is None:  # a branch that feeds no loss: autograd adds nothing to this weight's gradient
            return
        counts = gradient._use_count(), sys.getrefcount(gradient)  # type: ignore[attr-defined]
        if ACTIVE and (owner := weight()) is not None:
            ACTIVE[0].before(owner, gradient, counts)

    def after(owner: torch.Tensor) -> None:
        if ACTIVE:
            ACTIVE[0].after(owner)

    before.teraio = True  # type: ignore[attr-defined]
    tensor.register_hook(before)
    handle = tensor.register_post_accumulate_grad_hook(after)
    _put_first(tensor._post_accumulate_grad_hooks, handle.id)


def _put_first(hooks: dict[int, Any], key: int) -> None:
    """Before those of the user's that were there: what they read wears the guard. Torch goes through it in
    C++, by when each was put in."""
    for other in [other for other in hooks if other != key]:
        hooks[other] = hooks.pop(other)


@torch.inference_mode(False)
@torch.enable_grad()
def _taken_over_at() -> tuple[Counts | None, int]:
    """What a hook sees of a gradient whose storage the weight is about to take over, tried on a small one,
    None if this torch takes over none; and how many tensors share its bytes when the weight has it."""
    made_at: list[int] = []
    seen: list[Counts] = []
    sharing: list[int] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            made = gradient * 2
            made_at.append(made.untyped_storage()._cdata)
            return made

    weight = torch.nn.Parameter(torch.ones(4))

    def before(gradient: torch.Tensor) -> None:
        seen.append((gradient._use_count(), sys.getrefcount(gradient)))  # type: ignore[attr-defined]

    def after(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        sharing.append(sharers(weight.grad.untyped_storage()._cdata))

    weight.register_hook(before)
    weight.register_post_accumulate_grad_hook(after)
    Double.apply(weight).sum().backward()
    assert weight.grad is not None
    taken_over = weight.grad.untyped_storage()._cdata == made_at[0]
    return seen[0] if taken_over else None, sharing[0]


TAKEN_OVER_AT, SHARED_AFTER = _taken_over_at()
