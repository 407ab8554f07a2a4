"""Test cases for adoption, with the expected outcome of each.

Adoption gives torch's own memory to a storage that torch cannot resize, such as a storage in memory of a file
or of numpy.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from for_now import folder_for_now
from torch import nn

from teraio.runtime.ledger.adoption import (
    MOSTLY_UNUSED,
    NUMPY,
    OVERLAP,
    SHARED,
    SUBCLASS,
    UNSEEN,
    make_resizable,
)

SIZE = 2048
FOLDER = folder_for_now("adopt")


@dataclass
class Case:
    """A storage to adopt. `tensor` uses this storage, and is passed to adoption. `aliases` are more tensors
    with the same bytes. `others` are objects that the case keeps alive.
    """

    tensor: torch.Tensor
    aliases: tuple[torch.Tensor, ...] = ()
    others: tuple[Any, ...] = ()
    reason: str | None = None
    also: tuple[torch.Tensor, ...] = ()  # more tensors that are passed to adoption


def values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(SIZE, dtype=torch.float32).to(dtype)


def path(name: str) -> str:
    return str(FOLDER / name)


def loaded(mmap: bool) -> torch.Tensor:
    torch.save({"w": values()}, path("one.pt"))
    tensor: torch.Tensor = torch.load(path("one.pt"), mmap=mmap)["w"]
    return tensor


def from_safetensors() -> torch.Tensor:
    from safetensors.torch import load_file, save_file

    save_file({"w": values(), "other": values()}, path("one.safetensors"))
    return load_file(path("one.safetensors"))["w"]


def foreign(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor whose bytes a numpy array once shared, so that torch cannot resize the tensor."""
    tensor = values(dtype)
    tensor.view(torch.uint8).numpy()
    return tensor


def from_map(mode: Any) -> torch.Tensor:
    values().numpy().tofile(path(f"map.{mode}"))
    return torch.from_numpy(np.memmap(path(f"map.{mode}"), np.float32, mode))


def from_file(shared: bool, size: int = SIZE) -> torch.Tensor:
    np.arange(size, dtype=np.float32).tofile(path(f"file.{shared}.{size}"))
    return torch.from_file(path(f"file.{shared}.{size}"), shared, size)


def hidden(array: Any) -> None:
    """Keep the array alive by a reference that Python's garbage collector does not see."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(array))


class Wrapped(nn.Parameter):
    pass


def aliases_of_a_base_without_a_name() -> Case:
    with torch.enable_grad():
        base = foreign().requires_grad_()
        view = base[:-1].view(-1)
    return Case(view)


def after_a_backward() -> Case:
    weight = nn.Parameter(foreign())
    with torch.enable_grad():
        loss = (weight * 2).sum()
    loss.backward()
    weight.register_post_accumulate_grad_hook(lambda p: None)
    return Case(weight, others=(loss,))


def saved_by_a_graph() -> Case:
    """Make a case in which an autograd graph has saved a tensor object of its own over the bytes of `tensor`.
    Adoption cannot find this object, so it refuses the storage.
    """
    with torch.enable_grad():
        out = torch.ones(SIZE, requires_grad=True).exp()
        loss = out.sum()
    out.detach().numpy()
    return Case(out, others=(loss,), reason=UNSEEN)


def optimizer_state() -> Case:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), path("optimizer.pt"))
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(torch.load(path("optimizer.pt"), mmap=True))
    moments = again.state[model.weight]
    return Case(moments["exp_avg"], others=(again,), also=(moments["exp_avg_sq"],))


def weight_in_a_cycle() -> Case:
    weight = nn.Parameter(foreign())
    ring: list[Any] = [weight.data]
    ring.append(ring)
    return Case(weight, (ring[0],))


def flat_buffer() -> Case:
    flat = from_safetensors()
    first, second = nn.Parameter(flat[: SIZE // 2]), nn.Parameter(flat[SIZE // 2 :].view(2, -1))
    return Case(first, (flat,), also=(second,))


def live(tensor: torch.Tensor, *others: Any, reason: str) -> Case:
    return Case(tensor, others=others, reason=reason)


def numpy_that_lives(seen: bool) -> Case:
    tensor = values()
    array = tensor.numpy()
    if not seen:
        hidden(array)
    return live(tensor, *([array] if seen else []), reason=NUMPY if seen else UNSEEN)


def numpy_of_a_weight() -> Case:
    weight = nn.Parameter(values())
    hidden(weight.detach().numpy())
    return live(weight, reason=UNSEEN)


def array_that_lives() -> Case:
    array = np.arange(SIZE, dtype=np.float32)
    return live(torch.from_numpy(array), {"mine": [array[::-2]]}, reason=NUMPY)


def two_storages() -> Case:
    array = np.arange(SIZE, dtype=np.float32)
    return live(torch.from_numpy(array), torch.from_numpy(array[8:]), reason=OVERLAP)


def slice_of_the_storage() -> Case:
    tensor = foreign()
    return live(tensor, tensor.untyped_storage()[:4000], reason=UNSEEN)


def dlpack(consume: Callable[[Any], Any], reason: str) -> Case:
    tensor = foreign()
    return live(tensor, consume(tensor), reason=reason)


def tied(other: Callable[[nn.Parameter], nn.Parameter]) -> Case:
    weight = nn.Parameter(foreign())
    second = other(weight)
    return Case(weight, (second,), also=(second,))


def seen_as(tensor: torch.Tensor, views: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> Case:
    with torch.enable_grad():
        return Case(tensor, views(tensor))


CASES: dict[str, Callable[[], Case]] = {
    "torch.load": lambda: Case(nn.Parameter(loaded(mmap=False))),
    "torch.load, mapped": lambda: Case(nn.Parameter(loaded(mmap=True))),
    "safetensors": lambda: Case(nn.Parameter(from_safetensors())),
    "from_numpy, the array is gone": lambda: Case(torch.from_numpy(np.arange(SIZE, dtype=np.float32))),
    "numpy(), the array is gone": lambda: Case(foreign()),
    "a file mapped for reading": lambda: Case(from_map("r")),
    "a file mapped copy on write": lambda: Case(from_map("c")),
    "torch.from_file": lambda: Case(from_file(shared=False)),
    "tied": lambda: tied(lambda p: p),
    "tied by two parameters": lambda: tied(lambda p: nn.Parameter(p.data)),
    "two parameters in a flat buffer": flat_buffer,
    "transposed": lambda: seen_as(foreign().view(32, 64).t(), lambda t: (t.t(), t[3:])),
    "views with offsets": lambda: seen_as(foreign(), lambda t: (t[5:], t[3:9].view(2, 3), t.expand(2, SIZE))),
    ".data and detach()": lambda: seen_as(nn.Parameter(foreign()), lambda p: (p.data, p.detach())),
    "a view's base without a name": aliases_of_a_base_without_a_name,
    "a view that needs a gradient": lambda: seen_as(nn.Parameter(foreign()), lambda p: (p.view(-1)[1:],)),
    "frozen": lambda: Case(nn.Parameter(foreign(), requires_grad=False)),
    "a buffer": lambda: Case(nn.Buffer(foreign())),
    "bfloat16": lambda: Case(nn.Parameter(foreign(torch.bfloat16))),
    "complex": lambda: seen_as(foreign(torch.complex64), lambda t: (t.real, torch.view_as_real(t))),
    "of a cycle": weight_in_a_cycle,
    "after a backward": after_a_backward,
    "optimizer states": optimizer_state,
    # ---- storages that adoption refuses
    "shared memory": lambda: live(values().share_memory_(), reason=SHARED),
    "torch.from_file, shared": lambda: live(from_file(shared=True), reason=SHARED),
    "a file mapped for writing": lambda: live(from_map("r+"), reason=SHARED),
    "numpy(), the array lives": lambda: numpy_that_lives(seen=True),
    "numpy(), the array lives unseen": lambda: numpy_that_lives(seen=False),
    "numpy() of a weight, unseen": numpy_of_a_weight,
    "from_numpy, the array lives": array_that_lives,
    "two storages in the same memory": two_storages,
    "a slice of the storage": slice_of_the_storage,
    "torch.from_dlpack": lambda: dlpack(torch.from_dlpack, OVERLAP),
    "np.from_dlpack": lambda: dlpack(np.from_dlpack, NUMPY),
    "a DLPack capsule": lambda: dlpack(lambda t: t.__dlpack__(), UNSEEN),
    "saved by a graph": saved_by_a_graph,
    "a subclass": lambda: live(Wrapped(foreign()), reason=SUBCLASS),
    "a small part of a file": lambda: Case(from_file(False, 4 * SIZE)[:SIZE].detach(), reason=MOSTLY_UNUSED),
}


def state_of(case: Case) -> list[Any]:
    """Return the properties that adoption must not change: the tensors' ids, versions and layouts."""
    return [
        (id(t), t._version, t.is_leaf, t.requires_grad, t.storage_offset(), t.stride(), t._base is None)
        for t in (case.tensor, *case.aliases, *case.also)
    ]


def digest(case: Case) -> list[bytes]:
    tensors = (case.tensor, *case.aliases, *case.also)
    return [t.detach().flatten().clone().view(torch.uint8).numpy().tobytes() for t in tensors]


def verdict(case: Case, before: list[Any], bits: list[bytes], address: int, reason: str | None) -> str:
    """Compare a case after adoption with its state before. Return the faults as text, or an empty string if
    there is none.
    """
    storage = case.tensor.untyped_storage()
    checks: list[tuple[bool, str]] = [
        (reason == case.reason, f"refused because of {reason!r}, not {case.reason!r}"),
        (state_of(case) == before, "tensors changed"),
        (digest(case) == bits, "other values"),
    ]
    if case.reason is not None:
        checks.append((storage.data_ptr() == address, "a refused storage was moved"))
    else:
        adopted = storage.resizable() and not storage.is_shared()
        checks.append((adopted, "it still cannot be emptied"))
        if not adopted:
            # Skip the write to the storage, because its memory may be read-only.
            return "; ".join(wrong for right, wrong in checks if not right)
        storage.fill_(0)  # type: ignore[attr-defined]
        left = [t for t in (case.tensor, *case.aliases) if t.detach().abs().sum()]
        checks.append((not left, "an alias does not see a write"))
    return "; ".join(wrong for right, wrong in checks if not right)


def outcomes() -> dict[str, str]:
    """Adopt the storages of all cases, and return the faults by case. One call of adoption handles all cases,
    because each call searches the whole process for references.
    """
    gc.collect()
    cases = {name: make() for name, make in CASES.items()}
    before = {
        name: (state_of(c), digest(c), c.tensor.untyped_storage().data_ptr()) for name, c in cases.items()
    }
    to_adopt = [(name, t) for name, case in cases.items() for t in (case.tensor, *case.also)]
    result = make_resizable(to_adopt)
    reasons = {refused.name: refused.reason for refused in result.refused}
    return {name: verdict(case, *before[name], reasons.get(name)) for name, case in cases.items()}
