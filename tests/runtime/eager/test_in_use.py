"""Tensors that an operator uses, or whose address is in use.

The engine does not evict such tensors, and it records each write to them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from memory_maps import rights

from teraio.runtime.device.cpu import CpuDevice
from teraio.runtime.torch_extension.observer import InUseError, Observer, WrittenError

SIZE = 1024
Use = Callable[[torch.Tensor], Any]

MEANWHILE: list[Callable[[], None]] = []  # functions that the test operator calls while it runs


def waits(x: torch.Tensor) -> None:
    MEANWHILE.pop()()


def waits_of_many(xs: Sequence[torch.Tensor]) -> None:
    MEANWHILE.pop()()


def fills(x: torch.Tensor) -> None:
    """Write to the tensor through its address, as a kernel of another library does."""
    ctypes.memset(x.data_ptr(), 0, 16)


OTHERS = torch.library.Library("teraio_tests_in_use", "DEF")
OTHERS.define("waits(Tensor x) -> ()")
OTHERS.define("waits_of_many(Tensor[] xs) -> ()")
OTHERS.define("fills_(Tensor(a!) x) -> ()")
OTHERS.impl("waits", waits, "CPU")
OTHERS.impl("waits_of_many", waits_of_many, "CPU")
OTHERS.impl("fills_", fills, "CPU")
OPS = torch.ops.teraio_tests_in_use


@pytest.fixture
def observer() -> Observer:
    found = CpuDevice().observer
    assert found is not None
    return found


@pytest.fixture
def tensor(observer: Observer) -> Iterator[torch.Tensor]:
    """Yield a tensor. The observer watches for writes to the tensor, as if the tensor had a clean copy."""
    made = torch.arange(SIZE, dtype=torch.float32)
    observer.watch_for_writes(made.untyped_storage())
    observer.rearm_address_watch()
    yield made
    observer.forget_storage(made.untyped_storage()._cdata, alive=True)


def can_be_evicted(tensor: torch.Tensor) -> bool:
    """Return whether the observer allows an eviction of the tensor.

    If it allows the eviction, evict the tensor and make it resident again.
    """
    observer, storage = CpuDevice().observer, tensor.untyped_storage()
    assert observer is not None
    try:
        block = observer.make_empty_block(storage)
        observer.empty_storage(storage, False, block)
    except InUseError:
        return False
    assert storage.nbytes() == tensor.nbytes
    observer.give_block_to_storage(storage, block)
    return True


USES: dict[str, Use] = {
    "alone": OPS.waits,
    "in a list": lambda x: OPS.waits_of_many([torch.ones(1), x]),
    "a view": lambda x: OPS.waits(x[3:].view(-1)),
    "detached": lambda x: OPS.waits(x.detach()),
    "without grad mode": torch.no_grad()(OPS.waits),
    "in inference mode": torch.inference_mode()(OPS.waits),
}


@pytest.mark.parametrize("use", USES)
def test_tensor_is_evictable_only_after_its_operator_has_ended(tensor: torch.Tensor, use: str) -> None:
    evicted: list[bool] = []
    MEANWHILE.append(lambda: evicted.append(can_be_evicted(tensor)))
    USES[use](tensor)
    assert evicted == [False]
    assert can_be_evicted(tensor)
    assert tensor.tolist() == list(range(SIZE))


def test_tensor_is_evictable_after_its_operator_has_failed(tensor: torch.Tensor) -> None:
    def fails() -> None:
        raise ValueError

    MEANWHILE.append(fails)
    with pytest.raises(ValueError):
        OPS.waits(tensor)
    assert can_be_evicted(tensor)


def test_taken_address_remains_valid_until_the_step_ends(tensor: torch.Tensor, observer: Observer) -> None:
    assert can_be_evicted(tensor)
    address = tensor.data_ptr()
    assert observer.is_address_taken(tensor.untyped_storage()._cdata)
    assert not can_be_evicted(tensor)
    assert ctypes.c_float.from_address(address + 4).value == 1.0
    observer.forget_taken_addresses()
    assert can_be_evicted(tensor)


def fence_of(tensor: torch.Tensor, observer: Observer) -> int:
    """Evict the tensor and make it resident again.

    Return the address of the tensor's fence, which is the inaccessible memory at an evicted tensor's address.
    """
    storage = tensor.untyped_storage()
    block = observer.make_empty_block(storage)
    observer.empty_storage(storage, False, block)
    with observer.ignore_own_addresses():
        address = storage.data_ptr()
    observer.give_block_to_storage(storage, block)
    return address


def test_fence_keeps_its_address_until_the_tensor_is_written(
    tensor: torch.Tensor, observer: Observer
) -> None:
    first = fence_of(tensor, observer)
    observer.forget_taken_addresses()
    assert fence_of(tensor, observer) == first
    assert ctypes.c_float.from_address(first + 4).value == 1.0, "the fence shows other bytes than the current"
    tensor.mul_(2)
    second = fence_of(tensor, observer)
    assert second != first, "an old address leads to other bytes"
    assert ctypes.c_float.from_address(second + 4).value == 2.0
    observer.forget_taken_addresses()
    assert not rights(first)
    assert fence_of(tensor, observer) == second
    assert ctypes.c_float.from_address(second + 4).value == 2.0


@pytest.mark.parametrize("size", [SIZE, 2**16])
def test_thread_reads_old_bytes_at_an_address_after_the_storage_is_freed(
    observer: Observer, size: int
) -> None:
    """The thread reads through a pointer that the observer has not given to it."""
    tensor = torch.arange(size, dtype=torch.float32)
    storage, copy = tensor.untyped_storage(), tensor.clone()
    observer.watch_for_writes(storage)
    with observer.ignore_own_addresses():
        address = storage.data_ptr()
    with ThreadPoolExecutor(1) as other:
        other.submit(tensor.sum).result()
        observer.empty_storage(storage, unwritten=False)
        # These tensors take the storage's old memory, if that memory is free.
        others = [torch.full((size,), 7.0) for _ in range(64)]
        block = observer.make_empty_block(storage)
        block.resize_(4 * size)
        torch.empty(0).set_(block, 0, (size,), (1,)).copy_(copy)
        observer.give_block_to_storage(storage, block)
        array = (ctypes.c_float * size).from_address(address)
        assert other.submit(lambda: list(array)).result() == copy.tolist()
        observer.forget_taken_addresses()  # the step ends while the thread still reads at the address
        assert other.submit(lambda: list(array)).result() == copy.tolist()
    assert all(bool((each == 7).all()) for each in others)
    observer.forget_storage(storage._cdata, alive=True)


def test_fence_is_freed_with_its_storage(observer: Observer) -> None:
    tensor = torch.arange(SIZE, dtype=torch.float32)
    observer.watch_for_writes(tensor.untyped_storage())
    address = fence_of(tensor, observer)
    assert rights(address)
    observer.forget_storage(tensor.untyped_storage()._cdata, alive=False)
    del tensor
    observer.forget_taken_addresses()
    assert not rights(address)


WRITES: dict[str, Use] = {
    "in place": lambda x: x.mul_(2),
    "a view": lambda x: x[5:].view(-1).zero_(),
    "detached": lambda x: x.detach().zero_(),
    "data": lambda x: x.data.zero_(),
    "an element": lambda x: x.__setitem__(3, 0.0),
    "out": lambda x: torch.add(x, 1, out=x),
    "in a list": lambda x: torch._foreach_mul_([torch.ones(2), x], 2.0),
    "another library": OPS.fills_,
    "by its address": lambda x: ctypes.memset(x.data_ptr(), 0, 16),
    "its storage": lambda x: x.untyped_storage().__setitem__(0, 7),
    "without grad mode": lambda x: torch.no_grad()(x.zero_)(),
    "in inference mode": lambda x: torch.inference_mode()(x.zero_)(),
}
READS: dict[str, Use] = {
    "a sum": lambda x: x.sum(),
    "a view": lambda x: x[5:].view(-1),
    "detached": lambda x: x.detach(),
    "an element": lambda x: x[3].item(),
    "a copy": lambda x: x.clone(),
    "in a list": lambda x: torch._foreach_norm([torch.ones(2), x]),
    "as a source": lambda x: torch.empty_like(x).copy_(x),
    "all of it": lambda x: x.tolist(),
}


@pytest.mark.parametrize("write", WRITES)
def test_write_is_noted(tensor: torch.Tensor, observer: Observer, write: str) -> None:
    WRITES[write](tensor)
    assert observer.is_written_since_copy(tensor.untyped_storage()._cdata)
    observer.forget_taken_addresses()
    with pytest.raises(WrittenError):
        observer.empty_storage(tensor.untyped_storage(), unwritten=True)


@pytest.mark.parametrize("read", READS)
def test_read_is_not_noted_as_a_write(tensor: torch.Tensor, observer: Observer, read: str) -> None:
    READS[read](tensor)
    assert not observer.is_written_since_copy(tensor.untyped_storage()._cdata)
    block = observer.make_empty_block(tensor.untyped_storage())
    observer.empty_storage(tensor.untyped_storage(), True, block)
    observer.give_block_to_storage(tensor.untyped_storage(), block)


@pytest.mark.parametrize("name", ["in place", "out", "in a list", "an element", "in inference mode"])
def test_tensor_that_an_operator_uses_is_reported_as_touched(
    tensor: torch.Tensor, observer: Observer, name: str
) -> None:
    observer.newly_touched_storage_keys()
    WRITES[name](tensor)
    assert observer.newly_touched_storage_keys() == [tensor.untyped_storage()._cdata]
    READS.get(name, torch.sum)(tensor)
    assert observer.newly_touched_storage_keys() == [tensor.untyped_storage()._cdata]


def test_operator_that_reads_no_bytes_is_not_reported_as_a_touch(
    tensor: torch.Tensor, observer: Observer
) -> None:
    observer.newly_touched_storage_keys()
    for look in (torch.detach, torch.t, torch.empty_like, torch.is_floating_point):
        look(tensor[None, 5:])
    torch.ops.aten._unsafe_view(tensor, (1, -1))
    assert observer.newly_touched_storage_keys() == []


def test_address_taken_after_the_next_program_is_noted_again(
    tensor: torch.Tensor, observer: Observer
) -> None:
    tensor.mul_(2)
    observer.rearm_address_watch()
    tensor.data_ptr()
    assert observer.is_address_taken(tensor.untyped_storage()._cdata)
