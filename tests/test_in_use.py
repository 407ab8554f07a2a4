"""What an operator uses, or whose address someone has, does not leave; and who writes is noted."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from teraio.runtime.device import CpuDevice
from teraio.runtime.observer import InUseError, Observer, WrittenError

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
    here.copied(made.untyped_storage())
    here.rearm()
    yield made
    here.forget(made.untyped_storage()._cdata, alive=True)


def leaves(tensor: torch.Tensor) -> bool:
    """Whether it may; if so it has left, and is here again."""
    here, storage = CpuDevice().observer, tensor.untyped_storage()
    assert here is not None
    try:
        block = here.take(storage, unwritten=False)
    except InUseError:
        return False
    assert storage.nbytes() == tensor.nbytes
    here.arrive(storage, block)
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
    assert here.pointed(tensor.untyped_storage()._cdata)
    assert not leaves(tensor)
    assert ctypes.c_float.from_address(address + 4).value == 1.0
    here.forget_addresses()
    assert leaves(tensor)


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
    assert here.written(tensor.untyped_storage()._cdata)
    here.forget_addresses()
    with pytest.raises(WrittenError):
        here.take(tensor.untyped_storage(), unwritten=True)


@pytest.mark.parametrize("read", READS)
def test_who_reads_is_not_taken_for_one_who_writes(tensor: torch.Tensor, here: Observer, read: str) -> None:
    READS[read](tensor)
    assert not here.written(tensor.untyped_storage()._cdata)
    block = here.take(tensor.untyped_storage(), unwritten=True)
    here.arrive(tensor.untyped_storage(), block)


def test_a_kernel_that_takes_an_address_hides_no_one_after_the_next_program(
    tensor: torch.Tensor, here: Observer
) -> None:
    tensor.mul_(2)
    here.rearm()
    tensor.data_ptr()
    assert here.pointed(tensor.untyped_storage()._cdata)
