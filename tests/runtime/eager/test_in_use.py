"""What an operator uses, or whose address someone has, does not leave; and who writes is noted."""

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

MEANWHILE: list[Callable[[], None]] = []  # what is done while an operator runs


def waits(x: torch.Tensor) -> None:
    MEANWHILE.pop()()


def waits_of_many(xs: Sequence[torch.Tensor]) -> None:
    MEANWHILE.pop()()


def fills(x: torch.Tensor) -> None:
    """As a kernel of another library writes: through an address."""
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
def here() -> Observer:
    found = CpuDevice().observer
    assert found is not None
    return found


@pytest.fixture
def tensor(here: Observer) -> Iterator[torch.Tensor]:
    """It has a copy that is good."""
    made = torch.arange(SIZE, dtype=torch.float32)
    here.watch_for_writes(made.untyped_storage())
    here.rearm_address_watch()
    yield made
    here.forget_storage(made.untyped_storage()._cdata, alive=True)


def leaves(tensor: torch.Tensor) -> bool:
    """Whether it may; if so it has left, and is here again."""
    here, storage = CpuDevice().observer, tensor.untyped_storage()
    assert here is not None
    try:
        block = here.make_empty_block(storage)
        here.empty_storage(storage, False, block)
    except InUseError:
        return False
    assert storage.nbytes() == tensor.nbytes
    here.give_block_to_storage(storage, block)
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
def test_what_an_operator_uses_leaves_when_it_has_ended(tensor: torch.Tensor, use: str) -> None:
    left: list[bool] = []
    MEANWHILE.append(lambda: left.append(leaves(tensor)))
    USES[use](tensor)
    assert left == [False]
    assert leaves(tensor)
    assert tensor.tolist() == list(range(SIZE))


def test_what_an_operator_that_failed_used_leaves(tensor: torch.Tensor) -> None:
    def fails() -> None:
        raise ValueError

    MEANWHILE.append(fails)
    with pytest.raises(ValueError):
        OPS.waits(tensor)
    assert leaves(tensor)


def test_an_address_is_good_until_the_step_ends(tensor: torch.Tensor, here: Observer) -> None:
    assert leaves(tensor)
    address = tensor.data_ptr()
    assert here.is_address_taken(tensor.untyped_storage()._cdata)
    assert not leaves(tensor)
    assert ctypes.c_float.from_address(address + 4).value == 1.0
    here.forget_taken_addresses()
    assert leaves(tensor)


def fence_of(tensor: torch.Tensor, here: Observer) -> int:
    """Evict it and have it back. Return where it was fenced meanwhile."""
    storage = tensor.untyped_storage()
    block = here.make_empty_block(storage)
    here.empty_storage(storage, False, block)
    with here.ignore_own_addresses():
        address = storage.data_ptr()
    here.give_block_to_storage(storage, block)
    return address


def test_a_tensor_is_fenced_where_it_was_before(tensor: torch.Tensor, here: Observer) -> None:
    first = fence_of(tensor, here)
    here.forget_taken_addresses()
    assert fence_of(tensor, here) == first
    assert ctypes.c_float.from_address(first + 4).value == 1.0, "it finds the bytes of now"
    tensor.mul_(2)
    second = fence_of(tensor, here)
    assert second != first, "someone has an address that leads to other bytes"
    assert ctypes.c_float.from_address(second + 4).value == 2.0
    here.forget_taken_addresses()
    assert not rights(first)
    assert fence_of(tensor, here) == second
    assert ctypes.c_float.from_address(second + 4).value == 2.0


@pytest.mark.parametrize("size", [SIZE, 2**16])
def test_a_thread_reads_on_where_bytes_were_that_are_freed(here: Observer, size: int) -> None:
    """As through a pointer of which nobody knows."""
    tensor = torch.arange(size, dtype=torch.float32)
    storage, copy = tensor.untyped_storage(), tensor.clone()
    here.watch_for_writes(storage)
    with here.ignore_own_addresses():
        address = storage.data_ptr()
    with ThreadPoolExecutor(1) as other:
        other.submit(tensor.sum).result()
        here.empty_storage(storage, unwritten=False)
        others = [torch.full((size,), 7.0) for _ in range(64)]  # where it was, if that is free
        block = here.make_empty_block(storage)
        block.resize_(4 * size)
        torch.empty(0).set_(block, 0, (size,), (1,)).copy_(copy)
        here.give_block_to_storage(storage, block)
        array = (ctypes.c_float * size).from_address(address)
        assert other.submit(lambda: list(array)).result() == copy.tolist()
        here.forget_taken_addresses()  # the step ends, and it still reads there
        assert other.submit(lambda: list(array)).result() == copy.tolist()
    assert all(bool((each == 7).all()) for each in others)
    here.forget_storage(storage._cdata, alive=True)


def test_fences_go_with_what_they_fence(here: Observer) -> None:
    tensor = torch.arange(SIZE, dtype=torch.float32)
    here.watch_for_writes(tensor.untyped_storage())
    address = fence_of(tensor, here)
    assert rights(address)
    here.forget_storage(tensor.untyped_storage()._cdata, alive=False)
    del tensor
    here.forget_taken_addresses()
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
def test_who_writes_is_noted(tensor: torch.Tensor, here: Observer, write: str) -> None:
    WRITES[write](tensor)
    assert here.is_written_since_copy(tensor.untyped_storage()._cdata)
    here.forget_taken_addresses()
    with pytest.raises(WrittenError):
        here.empty_storage(tensor.untyped_storage(), unwritten=True)


@pytest.mark.parametrize("read", READS)
def test_who_reads_is_not_taken_for_one_who_writes(tensor: torch.Tensor, here: Observer, read: str) -> None:
    READS[read](tensor)
    assert not here.is_written_since_copy(tensor.untyped_storage()._cdata)
    block = here.make_empty_block(tensor.untyped_storage())
    here.empty_storage(tensor.untyped_storage(), True, block)
    here.give_block_to_storage(tensor.untyped_storage(), block)


@pytest.mark.parametrize("name", ["in place", "out", "in a list", "an element", "in inference mode"])
def test_what_an_operator_uses_is_told(tensor: torch.Tensor, here: Observer, name: str) -> None:
    here.newly_touched_storage_keys()
    WRITES[name](tensor)
    assert here.newly_touched_storage_keys() == [tensor.untyped_storage()._cdata]
    READS.get(name, torch.sum)(tensor)
    assert here.newly_touched_storage_keys() == [tensor.untyped_storage()._cdata]


def test_what_an_operator_only_looks_at_is_not_told(tensor: torch.Tensor, here: Observer) -> None:
    here.newly_touched_storage_keys()
    for look in (torch.detach, torch.t, torch.empty_like, torch.is_floating_point):
        look(tensor[None, 5:])
    assert here.newly_touched_storage_keys() == []


def test_a_kernel_that_takes_an_address_hides_no_one_after_the_next_program(
    tensor: torch.Tensor, here: Observer
) -> None:
    tensor.mul_(2)
    here.rearm_address_watch()
    tensor.data_ptr()
    assert here.is_address_taken(tensor.untyped_storage()._cdata)
