"""Adoption: a storage that cannot be emptied in place gets memory of torch's own allocator.

    before   tensors, views, graphs    ->  storage         ->  bytes of a file, of torch.load, of numpy
    after    unchanged                 ->  same storage    ->  bytes of torch's own allocator

The storage object remains, and only its memory is exchanged, one storage at a time. Tensors, views and graphs
refer to the storage object, so they need no change and no recompile.

Some users of the memory have only the old address: (1) a numpy array of the tensor, (2) a DLPack export, (3)
a slice of the storage. After an adoption, such a user would read freed memory, or would miss later writes. So
a storage is adopted only if this module has found all users of its memory, and all of them refer to the
storage object. Every other storage is kept resident, and the reason is recorded.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..torch_extension.observer import observer_of_process
from .shards import local_tensor
from .shared_mappings import is_shared, shared_mappings

PLAIN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
# The number of objects that are passed to one call of gc.get_referents. With this number, the references of
# 2 million objects take 0.3 s.
AT_ONCE = 10_000

CLOSED = {tuple, dict}  # types of containers that the garbage collector may not list
SMALLEST_BYTES = 4096  # smaller storages get no record; their bytes are part of the budget's reserve

# True if torch can exchange the memory of a storage object. torch 2.11 has no `_swap_data_ptr_`. With torch
# 2.11, adoption makes a new storage object, and gives it to every tensor of the old storage object.
EXCHANGES = hasattr(torch.UntypedStorage, "_swap_data_ptr_")

OLD_TORCH = "a tensor of it cannot be rebound; torch 2.13 needs no rebinding"
SUBCLASS = "a tensor subclass"
LAYOUT = "sparse, nested or quantized"
NO_STORAGE = "it has no storage"
ELSEWHERE = "not in RAM"
SHARED = "shared with other processes"
NUMPY = "a numpy array shares its memory"
OVERLAP = "another storage shares its memory"
UNSEEN = "a holder outside of Python has it: a DLPack export, a graph, another library"
MOSTLY_UNUSED = "its tensors are less than half of its storage"


class Refused(NamedTuple):
    """A tensor whose storage was not adopted, and the reason."""

    name: str
    size_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Adopted:
    """The result of an adoption: the number of adopted storages, the sum of their bytes, and the tensors
    whose storages were not adopted."""

    count: int
    size_bytes: int
    refused: tuple[Refused, ...]


@dataclass(slots=True)
class Candidate:
    """A storage that may be adopted, and the tensors that use it."""

    name: str
    storage: torch.UntypedStorage
    aliases: list[torch.Tensor] = field(default_factory=list)


class MemorySpan(NamedTuple):
    """A range of addresses: the memory of a storage or of a numpy array.

    `storage` is the key of the storage, or None for an array.
    """

    begin: int
    end: int
    storage: int | None


LAST = MemorySpan(2**64, 2**64, None)


def make_resizable(tensors: Iterable[tuple[str, torch.Tensor]]) -> Adopted:
    """Adopt each storage of these tensors that cannot be emptied in place, if its adoption is safe.

    The storages are copied one after another, so at most one storage is in memory twice.
    """
    with _disable_torch_modes():
        candidates, refused = _split_candidates_from_unfit(tensors)
        reasons = _reasons_to_refuse(candidates)
        moved_bytes = 0
        for key, candidate in candidates.items():
            size_bytes = candidate.storage.nbytes()
            if key in reasons:
                refused.append(Refused(candidate.name, size_bytes, reasons[key]))
            else:
                copy_to_torch_allocator(candidate)
                assert is_resizable(candidate.storage), candidate.name
                moved_bytes += size_bytes
        return Adopted(len(candidates) - len(reasons), moved_bytes, tuple(refused))


def make_resizable_unchecked(candidates: Iterable[Candidate]) -> None:
    """Adopt these storages without a search for users of their memory. The caller knows all users."""
    with _disable_torch_modes():
        for candidate in candidates:
            copy_to_torch_allocator(candidate)


@contextlib.contextmanager
def _disable_torch_modes() -> Iterator[None]:
    here = observer_of_process()
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        with (
            torch._C.DisableTorchFunctionSubclass(),
            here.ignore_own_addresses() if here is not None else contextlib.nullcontext(),
        ):
            yield


def copy_to_torch_allocator(candidate: Candidate) -> None:
    """Copy the storage's bytes to memory of torch's allocator, and free the old bytes."""
    storage = candidate.storage
    # torch.UntypedStorage(size) would not take memory from torch's allocator for tensors. So make a tensor,
    # and take its storage.
    own = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()
    own.copy_(storage)
    if EXCHANGES:
        storage._swap_data_ptr_(own)  # type: ignore[attr-defined]
        if (here := observer_of_process()) is not None:
            here.note_new_address(storage)
        return
    for tensor in candidate.aliases:
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        tensor.data = empty.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())
    candidate.storage = own


def is_unresizable_weight(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a parameter that is large enough for a record, and whose storage cannot be
    emptied in place."""
    if not isinstance(tensor, torch.nn.Parameter):
        return False
    storage = storage_of(local_tensor(tensor))
    return storage is not None and storage.nbytes() >= SMALLEST_BYTES and not is_resizable(storage)


def is_resizable(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage may be emptied in place.

    Torch could empty memory that other processes share, but the engine must not. `is_shared` returns True for
    every CUDA storage, so only CPU storages are checked with it.
    """
    return storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared())


def weights_of_compiled_modules() -> list[tuple[str, torch.Tensor]]:
    """Return every parameter of every compiled module.

    torch passes only some of these parameters to the backend. If many compiled blocks share one program, the
    backend gets only the parameters of the first block.
    """
    from torch._dynamo.eval_frame import OptimizedModule

    modules = [m for m in gc.get_objects() if issubclass(type(m), torch.nn.Module)]
    compiled = [
        m
        for m in modules
        if issubclass(type(m), OptimizedModule) or vars(m).get("_compiled_call_impl") is not None
    ]
    return [(name, local_tensor(p)) for module in compiled for name, p in module.named_parameters()]


# ---- candidates


def _split_candidates_from_unfit(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> tuple[dict[int, Candidate], list[Refused]]:
    """Return the storages that may be adopted, by storage key, and the tensors whose storages cannot be
    adopted.

    Tensors that share a storage, such as tied weights, have one candidate.
    """
    candidates: dict[int, Candidate] = {}
    refused: list[Refused] = []
    for name, tensor in tensors:
        storage = storage_of(tensor)
        if storage is not None and is_resizable(storage):
            continue
        reason = _why_unfit(tensor, storage)
        if reason is not None or storage is None:
            size_bytes = tensor.numel() * tensor.element_size() if storage is None else storage.nbytes()
            refused.append(Refused(name, size_bytes, reason or NO_STORAGE))
        elif storage.nbytes():
            candidates.setdefault(storage._cdata, Candidate(name, storage))
    return candidates, refused


def _why_unfit(tensor: torch.Tensor, storage: torch.UntypedStorage | None) -> str | None:
    if type(tensor) not in PLAIN:
        return SUBCLASS
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return LAYOUT
    return ELSEWHERE if storage is not None and storage.device.type != "cpu" else None


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor, or None if the tensor has no storage.

    Call torch.Tensor's method, because a subclass may override it to return the storage of an inner tensor.
    """
    try:
        return torch.Tensor.untyped_storage(tensor)
    except RuntimeError:
        return None


# ---- holders


def _reasons_to_refuse(candidates: dict[int, Candidate]) -> dict[int, str]:
    """Return the keys of the storages that must not be adopted, each with the reason."""
    if not candidates:
        return {}
    held = [torch.empty(1, device="cpu")]  # a tensor without other users, whose use counts are the baseline
    probe = Candidate("", held[0].untyped_storage())
    asked = {**candidates, probe.storage._cdata: probe}
    running = _locals_of_running_functions()
    objects = gc.get_objects()
    tensors = _collect_all_tensors(objects, asked)
    _add_bases(asked)
    gradients = _count_gradient_uses(tensors)
    seen, arrays = _count_references(objects, running, {id(t) for c in asked.values() for t in c.aliases})
    spans = [*_spans_of_storages(tensors), *map(_span_of_array, arrays)]
    meeting = _overlapping_storages(spans)
    shared = shared_mappings()
    reasons: dict[int, str] = {}
    for key, candidate in candidates.items():
        reason = SHARED if is_shared(candidate.storage, shared) else meeting.get(key)
        reason = reason or _unseen_holder_reason(candidate, probe, seen, gradients)
        if reason is None and _covered_bytes(candidate.aliases) * 2 < candidate.storage.nbytes():
            reason = MOSTLY_UNUSED
        if reason is None and not EXCHANGES and not all(map(_can_be_rebound, candidate.aliases)):
            reason = OLD_TORCH
        if reason is not None:
            reasons[key] = reason
    return reasons


def _can_be_rebound(tensor: torch.Tensor) -> bool:
    """Return whether the tensor can get a new storage object without loss.

    This is so if size, stride and type describe the tensor completely.
    """
    special = tensor.is_conj() or tensor.is_neg() or tensor.is_inference()
    return type(tensor) in PLAIN and not special


def _collect_all_tensors(objects: Sequence[Any], asked: dict[int, Candidate]) -> list[torch.Tensor]:
    """Return all tensors of the process. Add each tensor that uses a storage in `asked` to its candidate."""
    tensors = [o for o in objects if issubclass(type(o), torch.Tensor)]
    for tensor in tensors:
        storage = storage_of(tensor)
        if storage is not None and (candidate := asked.get(storage._cdata)):
            candidate.aliases.append(tensor)
    return tensors


def _add_bases(asked: dict[int, Candidate]) -> None:
    """Add the base of each view to the candidate's tensors. Autograd may hold a base to which no Python
    object refers any more."""
    for candidate in asked.values():
        known = {id(t) for t in candidate.aliases}
        bases = {id(b): b for t in candidate.aliases if (b := t._base) is not None}
        candidate.aliases += [base for key, base in bases.items() if key not in known]


def _count_gradient_uses(tensors: Sequence[torch.Tensor]) -> Counter[int]:
    """Count, for each tensor, the leaf tensors whose `.grad` is this tensor."""
    leaves = (t for t in tensors if t.is_leaf and t.requires_grad)
    return Counter(id(leaf.grad) for leaf in leaves if leaf.grad is not None)


def _unseen_holder_reason(
    candidate: Candidate, probe: Candidate, seen: Counter[int], gradients: Counter[int]
) -> str | None:
    """Return UNSEEN if the storage has a user that was not found, otherwise None.

    Compare three counts with the users that were found:

        1  the use count of the storage
        2  the use count of each tensor in C++
        3  the reference count of each tensor in Python; C++ code holds the Python object at most once

    For a Parameter, skip count 3, because Dynamo and autograd hold Parameters while they run. No numpy
    array is missed: an array holds the tensor that the export to numpy made, and never the Parameter itself.
    """

    def uses(of: Candidate) -> int:
        return int(torch._C._storage_Use_Count(of.storage._cdata)) - len(of.aliases)

    if uses(candidate) != uses(probe):
        return UNSEEN
    alone = probe.aliases[0]
    for tensor in candidate.aliases:
        in_graph = tensor.requires_grad and tensor.is_leaf
        accumulator = torch.autograd.graph.get_gradient_edge(tensor) if in_graph else None
        views = [t for t in candidate.aliases if t._base is tensor]
        # A complex view of a real tensor holds its base twice: for forward-mode and for backward-mode
        # differentiation. So does a real view of a complex tensor.
        twice = sum(view.is_complex() != tensor.is_complex() for view in views)
        known = (accumulator is not None) + len(views) + twice + gradients[id(tensor)]
        if tensor._use_count() - alone._use_count() > known:  # type: ignore[attr-defined]
            return UNSEEN
        del accumulator, views
        hidden = (sys.getrefcount(tensor) - seen[id(tensor)]) - (sys.getrefcount(alone) - seen[id(alone)])
        if type(tensor) is not torch.nn.Parameter and hidden > (tensor._use_count() > alone._use_count()):  # type: ignore[attr-defined]
            return UNSEEN
    return None


def _count_references(
    objects: list[Any], running: list[Any], wanted: set[int]
) -> tuple[Counter[int], list[Any]]:
    """Count the references to each object whose id is in `wanted`, and find all numpy arrays.

    The garbage collector does not list arrays. It lists the objects that refer to arrays.
    """
    numpy = sys.modules.get("numpy")
    arrays = _subclasses(numpy.ndarray) if numpy is not None else set()
    seen: Counter[int] = Counter()
    found: dict[int, Any] = {}

    def count_in(referred: list[Any]) -> None:
        seen.update([id(x) for x in referred if id(x) in wanted])
        while referred and arrays:
            found.update((id(x), x) for x in referred if type(x) in arrays)
            # The garbage collector may not list a container of objects that it does not list, such as a tuple
            # of arrays. So look into these containers too.
            referred = gc.get_referents(*[x for x in referred if type(x) in CLOSED and not gc.is_tracked(x)])

    for begin in range(0, len(objects), AT_ONCE):
        count_in(gc.get_referents(*objects[begin : begin + AT_ONCE]))
    count_in(running)
    return seen, list(found.values())


def _subclasses(kind: type) -> set[type]:
    found = {kind}
    below: type
    for below in kind.__subclasses__():
        found |= _subclasses(below)
    return found


def _locals_of_running_functions() -> list[Any]:
    """Return the local variables of all running functions, because the garbage collector does not list them.

    Before Python 3.13, `frame.f_locals` leaves a copy of the variables in the frame. The copy would keep
    their values alive, so this function empties the copy. Under a debugger, Python writes the copy back to
    the variables, and the empty copy would delete them. So under a debugger this function returns no
    variables.
    """
    copies = sys.version_info < (3, 13)
    if copies and sys.gettrace() is not None:
        return []
    found: list[Any] = []
    waiting: list[Any] = list(sys._current_frames().values())
    while waiting:
        frame = waiting.pop()
        code = frame.f_code
        if frame.f_back is not None:
            waiting.append(frame.f_back)
        if code.co_flags & inspect.CO_OPTIMIZED and code.co_filename != __file__:
            values = frame.f_locals
            found += [values[name] for name in {*code.co_varnames} - {*code.co_cellvars} if name in values]
            # Only three references exist if no other code uses the copy: the frame's, `values`, and the
            # argument of getrefcount.
            if copies and sys.getrefcount(values) == 3:
                values.clear()
        del frame  # a variable that refers to this function's own frame would keep all callers alive
    return found


# ---- overlapping memory


def _spans_of_storages(tensors: Sequence[torch.Tensor]) -> Iterator[MemorySpan]:
    storages = {s._cdata: s for t in tensors if (s := storage_of(t)) is not None}
    for key, storage in storages.items():
        if storage.device.type == "cpu":
            with contextlib.suppress(RuntimeError):  # a fake tensor has no address
                yield MemorySpan(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), key)


def _span_of_array(array: Any) -> MemorySpan:
    address = array.__array_interface__["data"][0]
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides)]
    if not array.size:
        return MemorySpan(address, address, None)
    return MemorySpan(
        address + sum(r for r in reach if r < 0),
        address + sum(r for r in reach if r > 0) + array.itemsize,
        None,
    )


def _overlapping_storages(spans: Iterable[MemorySpan]) -> dict[int, str]:
    """Return the keys of storages whose memory overlaps another storage or an array, each with the reason to
    refuse its adoption."""
    found: dict[int, str] = {}
    group: list[MemorySpan] = []
    end = 0
    for span in [*sorted((s for s in spans if s.end > s.begin), key=itemgetter(0)), LAST]:
        if span.begin >= end:
            if len(group) > 1:
                reason = NUMPY if any(s.storage is None for s in group) else OVERLAP
                found.update((s.storage, reason) for s in group if s.storage is not None)
            group = []
        group.append(span)
        end = max(end, span.end)
    return found


def _covered_bytes(aliases: Sequence[torch.Tensor]) -> int:
    """Return the number of bytes from the first to the last byte of these tensors in their storage."""
    ends = []
    for tensor in aliases:
        if tensor.numel():
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
            first = int(tensor.storage_offset()) * tensor.element_size()
            ends.append((first, first + (reach + 1) * tensor.element_size()))
    return max(end for _, end in ends) - min(first for first, _ in ends) if ends else 0
