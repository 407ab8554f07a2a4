"""Calls of user code on evicted gradients that need no fetch: scalings are owed, and norms are remembered.

Each test evicts a gradient by itself, in the place of the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from teraio.errors import TeraioError
from teraio.runtime.device.cpu import CpuDevice
from teraio.runtime.torch_extension.observer import Observer, WrittenError

SIZE = 48
Call = Callable[[torch.Tensor], Any]


class Evicter:
    """The engine's part: a copy of each evicted gradient, and the fetches that the observer asks for."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # storage key -> tensor, copy
        self.fetched: list[str] = []
        self.ended: list[int] = []
        self.made: list[
            torch.Tensor
        ] = []  # alive, so that no other tensor gets the storage of an evicted one

    def make(self, values: torch.Tensor, name: str = "w.grad") -> torch.Tensor:
        made = values.clone()
        self.made.append(made)
        self.observer.watch_for_writes(made.untyped_storage())
        self.observer.note_gradient(made.untyped_storage(), name)
        return made

    def evict(self, tensor: torch.Tensor) -> None:
        self.observer.watch_for_writes(tensor.untyped_storage())
        self.copies[tensor.untyped_storage()._cdata] = tensor, tensor.clone()
        CpuDevice().drop_bytes(tensor.untyped_storage(), unwritten=True)

    def drop(self, tensor: torch.Tensor) -> None:
        """Evict the tensor without a new copy."""
        CpuDevice().drop_bytes(tensor.untyped_storage(), unwritten=True)

    def fetch_for_reader(self, keys: Sequence[int], place: str) -> None:
        self.fetched.append(place)
        for key in keys:
            tensor, copied = self.copies[key]
            storage = tensor.untyped_storage()
            block = self.observer.make_empty_block(storage)
            block.resize_(copied.nbytes)
            block.copy_(copied.untyped_storage())
            self.observer.give_block_to_storage(storage, block)

    def end_evictions(self, keys: Sequence[int]) -> None:
        self.ended += keys

    def note_failed_fetch(self, error: BaseException) -> None:
        raise AssertionError(error)

    def end_step(self) -> None:
        self.observer.forget_taken_addresses()


@pytest.fixture
def evicter() -> Iterator[Evicter]:
    observer = CpuDevice().observer
    assert observer is not None
    made = Evicter(observer)
    observer.report_to(made)
    yield made
    for tensor in made.made:
        tensor.sum()
        observer.forget_storage(tensor.untyped_storage()._cdata, alive=True)
    observer.report_to(None)
    for _ in range(5):
        made.end_step()  # the observer forgets the questions of this test


def values() -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(3))


SCALINGS: dict[str, Call] = {
    "number": lambda g: g.mul_(0.3),
    "tensor": lambda g: g.mul_(torch.tensor(0.3)),
    "double": lambda g: g.mul_(torch.tensor(0.3, dtype=torch.float64)),
    "integer": lambda g: g.mul_(torch.tensor(3)),
    "division": lambda g: g.div_(3).div_(torch.tensor(7.0)),
    "operator": lambda g: g.__imul__(0.7).__itruediv__(3),
    "without grad mode": torch.no_grad()(lambda g: g.mul_(0.3)),
    "in inference mode": torch.inference_mode()(lambda g: g.mul_(0.3)),
    "data": lambda g: g.data.mul_(0.3),
    "detached": lambda g: g.detach().mul_(0.3),
    "clamp": lambda g: g.clamp_(-0.2, 0.3).clamp_(max=0.1),
    "least": lambda g: g.clamp_min_(-0.1).clamp_max_(0.2),
    "infinite numbers": lambda g: g.mul_(float("inf")).nan_to_num_(1.0),
    "list": lambda g: torch._foreach_mul_([g], 0.3),
    "list by a tensor": lambda g: torch._foreach_mul_([g], torch.tensor(0.3)),
    "list divided": lambda g: torch._foreach_div_([g], 3.0),
    "list clamped": lambda g: (torch._foreach_clamp_min_([g], -0.1), torch._foreach_clamp_max_([g], 0.1)),
    "in a row": lambda g: g.mul_(0.3).clamp_(-0.2, 0.2).div_(0.7).mul_(torch.tensor(1e30)).mul_(1e30),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scaling_of_an_evicted_gradient_is_owed(evicter: Evicter, name: str) -> None:
    gradient, plain = evicter.make(values()), values()
    evicter.evict(gradient)
    before = gradient._version, plain._version
    SCALINGS[name](gradient)
    SCALINGS[name](plain)
    assert evicter.fetched == []
    assert evicter.observer.owes_scalings(gradient.untyped_storage()._cdata)
    assert gradient._version - before[0] == plain._version - before[1]
    assert gradient.view(torch.int32).tolist() == plain.view(torch.int32).tolist()
    assert len(evicter.fetched) == 1
    assert not evicter.observer.owes_scalings(gradient.untyped_storage()._cdata)


def test_scaled_gradient_is_dropped_without_a_new_copy(evicter: Evicter) -> None:
    """Check that the copy and the scalings make the same bytes again, and a norm of them."""
    gradient, plain = evicter.make(values()), values()
    evicter.evict(gradient)
    for _ in range(3):
        gradient.mul_(0.3)
        plain.mul_(0.3)
        assert torch.equal(gradient, plain)
        assert torch.equal(gradient.norm(), plain.norm())
        evicter.drop(gradient)
        assert evicter.observer.owes_scalings(gradient.untyped_storage()._cdata)
        assert torch.equal(gradient.norm(), plain.norm())
    assert torch.equal(gradient, plain)


def test_scaled_gradient_is_not_dropped_after_a_write(evicter: Evicter) -> None:
    for write in (lambda g: g.add_(1), lambda g: g.mul_(0.5), lambda g: g[:3].fill_(2.0)):
        gradient = evicter.make(values())
        evicter.evict(gradient)
        gradient.mul_(0.3)
        gradient.sum()
        write(gradient)
        with pytest.raises(WrittenError):
            evicter.drop(gradient)


def test_copy_of_a_scaled_gradient_has_the_scalings(evicter: Evicter) -> None:
    gradient = evicter.make(values())
    for _ in range(2):
        evicter.evict(gradient)
        gradient.mul_(0.3)
        gradient.sum()
    evicter.evict(gradient)
    assert not evicter.observer.owes_scalings(gradient.untyped_storage()._cdata)
    assert torch.equal(gradient, values().mul_(0.3).mul_(0.3))


def test_copy_is_stale_if_the_scaled_bytes_are_withheld(evicter: Evicter) -> None:
    """Check it for a gradient whose update is owed after a fetch."""
    gradient = evicter.make(values())
    storage = gradient.untyped_storage()
    evicter.evict(gradient)
    gradient.mul_(0.3)
    gradient.sum()
    block = CpuDevice().withhold_bytes(storage, unwritten=False)
    assert evicter.observer.is_written_since_copy(storage._cdata)
    assert not evicter.observer.owes_scalings(storage._cdata)
    CpuDevice().return_bytes(storage, block)
    assert torch.equal(gradient, values().mul_(0.3))


def test_later_changes_of_the_factor_change_nothing(evicter: Evicter) -> None:
    gradient, factor = evicter.make(values()), torch.tensor(0.5)
    evicter.evict(gradient)
    gradient.mul_(factor)
    factor.data.fill_(100.0)
    assert torch.equal(gradient, values() * 0.5)


def test_gradient_may_be_evicted_and_scaled_again(evicter: Evicter) -> None:
    gradient = evicter.make(values())
    for _ in range(3):
        evicter.evict(gradient)
        gradient.mul_(0.3)
        gradient.sum()
    assert torch.equal(gradient, values().mul_(0.3).mul_(0.3).mul_(0.3))


def test_scaling_in_another_thread_is_owed(evicter: Evicter) -> None:
    gradient = evicter.make(values())
    evicter.evict(gradient)
    thread = threading.Thread(target=lambda: gradient.mul_(0.3))
    thread.start()
    thread.join()
    assert evicter.fetched == []
    assert torch.equal(gradient, values().mul_(0.3))


NEEDS_BYTES: dict[str, Call] = {
    "sum": lambda g: g.add_(1),
    "a part": lambda g: g[:5].mul_(2),
    "many numbers": lambda g: g.mul_(torch.arange(float(SIZE))),
    "one number of many": lambda g: g.mul_(torch.full((1,), 2.0)),
    "itself": lambda g: g.mul_(g.sum()),
    "into another": lambda g: torch.mul(g, 2, out=g),
    "rounding": lambda g: g.div_(0.3, rounding_mode="floor"),
    "learnt factor": lambda g: g.mul_(torch.tensor(2.0, requires_grad=True)),
    "transposed": lambda g: g.view(6, 8).t().mul_(2),
}


@pytest.mark.parametrize("name", NEEDS_BYTES)
def test_other_writes_fetch_the_gradient(evicter: Evicter, name: str) -> None:
    gradient, plain = evicter.make(values()), values()
    evicter.evict(gradient)
    NEEDS_BYTES[name](gradient)
    NEEDS_BYTES[name](plain)
    assert torch.equal(gradient.detach(), plain.detach())
    if name != "transposed":  # its bytes are the gradient's, in another order of dimensions
        assert len(evicter.fetched) == 1


@pytest.mark.parametrize("factor", [torch.tensor(1j), torch.ones(SIZE + 1)], ids=["complex", "size"])
def test_scaling_that_fails_fails_at_once(evicter: Evicter, factor: torch.Tensor) -> None:
    gradient = evicter.make(values())
    evicter.evict(gradient)
    with pytest.raises(RuntimeError):
        gradient.mul_(factor)
    assert torch.equal(gradient, values())


def test_nothing_is_owed_while_an_update_reads_the_gradient(evicter: Evicter) -> None:
    gradient = evicter.make(values())
    key = gradient.untyped_storage()._cdata
    evicter.evict(gradient)
    evicter.observer.set_may_owe(key, False)
    gradient.mul_(0.3)
    assert evicter.fetched == ["aten::mul_"]
    assert torch.equal(gradient, values().mul_(0.3))


def test_scaling_ends_an_eviction_in_flight(evicter: Evicter) -> None:
    gradient = evicter.make(values())
    storage = gradient.untyped_storage()
    evicter.observer.begin_write_watch(storage)
    evicter.observer.arm_write_watch(storage)
    assert evicter.observer.some_are_evicted([gradient])
    gradient.mul_(2)
    gradient.mul_(2)
    assert evicter.ended == [storage._cdata]


def test_scaling_that_cannot_run_is_still_owed(evicter: Evicter) -> None:
    gradient = evicter.make(values())
    storage = gradient.untyped_storage()
    evicter.evict(gradient)
    gradient.mul_(0.3)
    block = evicter.observer.make_empty_block(storage)
    block.resize_(12)
    with pytest.raises(TeraioError, match="could not be scaled after its fetch: the gradient has 12 bytes"):
        evicter.observer.give_block_to_storage(storage, block)
    assert torch.equal(gradient, values().mul_(0.3))


# ---- norms

NORMS: dict[str, Call] = {
    "2": lambda g: torch.linalg.vector_norm(g, 2.0),
    "largest": lambda g: torch.linalg.vector_norm(g, float("inf")),
    "sum": lambda g: torch.linalg.vector_norm(g, 1),
    "double": lambda g: torch.linalg.vector_norm(g, 2.0, dtype=torch.float64),
    "method": lambda g: g.norm(),
    "data": lambda g: g.data.norm(2),
    "list": lambda g: torch._foreach_norm([g], 2.0)[0],
}


@pytest.mark.parametrize("name", NORMS)
def test_norm_is_remembered_from_the_second_step_on(evicter: Evicter, name: str) -> None:
    fetches = []
    for step in range(4):
        gradient = evicter.make(values() * step)
        evicter.evict(gradient)
        found, plain = NORMS[name](gradient), NORMS[name](values() * step)
        assert found.dtype == plain.dtype and found.shape == plain.shape and torch.equal(found, plain)
        found.mul_(7)  # user code may change its norm
        assert torch.equal(NORMS[name](gradient), plain)
        fetches.append(len(evicter.fetched))
        evicter.end_step()
    assert fetches == [1, 1, 1, 1]


def test_norms_of_one_list_are_foreseen_for_each_gradient(evicter: Evicter) -> None:
    for step in range(3):
        gradients = [evicter.make(values() * at, f"{at}.grad") for at in range(3)]
        if step > 0:
            for gradient in gradients:
                evicter.evict(gradient)
        # The engine's wrapper calls the operator for one evicted gradient at a time.
        lists = [gradients] if step == 0 else [[gradient] for gradient in gradients]
        found = [norm for each in lists for norm in torch._foreach_norm(each, 2.0)]
        assert torch.equal(torch.stack(found), torch.stack([(values() * at).norm() for at in range(3)]))
        evicter.end_step()
    assert evicter.fetched == []


def test_norm_follows_each_write_between_two_evictions(evicter: Evicter) -> None:
    gradient = evicter.make(values())
    gradient.norm()
    for write in (lambda g: g.add_(1), lambda g: g.zero_(), lambda g: g[:3].fill_(2)):
        evicter.evict(gradient)
        assert torch.equal(gradient.norm(), gradient.clone().norm())
        write(gradient)
        assert torch.equal(gradient.norm(), gradient.clone().norm())


def test_norm_of_a_scaled_gradient_is_foreseen_if_the_factor_is_the_same(evicter: Evicter) -> None:
    fetches = []
    for factor in (0.3, 0.3, 0.3, 0.7, 0.7, 0.7):
        gradient = evicter.make(values())
        evicter.evict(gradient)
        gradient.mul_(torch.tensor(factor))
        assert torch.equal(gradient.norm(), values().mul_(factor).norm())
        fetches.append(len(evicter.fetched))
        evicter.end_step()
    assert fetches == [1, 1, 1, 2, 2, 2]


def test_norm_after_a_factor_that_always_changes_is_not_foreseen(evicter: Evicter) -> None:
    """Check that such a norm of a resident gradient is a touch. So a plan that evicts the gradient fetches it
    for the norm.
    """
    found = []
    for step in range(5):
        gradient = evicter.make(values())
        gradient.mul_(torch.tensor(1.0 + step))
        evicter.observer.newly_touched_storage_keys()
        gradient.norm()
        found.append(gradient.untyped_storage()._cdata in evicter.observer.newly_touched_storage_keys())
        evicter.end_step()
    assert found == [True, False, False, True, True]


def test_norm_with_other_threads_is_computed_again(evicter: Evicter) -> None:
    threads = torch.get_num_threads()
    for _ in range(2):
        gradient = evicter.make(values())
        evicter.evict(gradient)
        gradient.norm()
        evicter.end_step()
    gradient = evicter.make(values())
    evicter.evict(gradient)
    try:
        torch.set_num_threads(threads + 1)
        gradient.norm()
    finally:
        torch.set_num_threads(threads)
    assert len(evicter.fetched) == 2


def test_calls_that_need_no_bytes_are_no_touches(evicter: Evicter) -> None:
    """Check that the profile of a step has no use of a gradient by a call that needs no bytes of an evicted
    gradient. The gradient is resident here.
    """
    touched = evicter.observer.newly_touched_storage_keys
    found = []
    for _ in range(2):
        gradient = evicter.make(values())
        key = gradient.untyped_storage()._cdata
        touched()
        gradient.mul_(0.5)
        found.append(key in touched())
        gradient.norm()
        found.append(key in touched())
        evicter.end_step()
    assert found == [False, True, False, False]


# ---- GradScaler


def unscale(gradient: torch.Tensor, found: torch.Tensor, scale: float) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, torch.full((), scale))


@pytest.mark.parametrize(
    "bad", [None, float("inf"), float("nan")], ids=["finite", "infinite", "not a number"]
)
def test_unscaling_and_the_norm_after_it_are_foreseen(evicter: Evicter, bad: float | None) -> None:
    fetches = []
    for step in range(4):
        made = values()
        if bad is not None and step == 3:
            made[5] = bad
        gradient, plain = evicter.make(made), made.clone()
        evicter.evict(gradient)
        found = [torch.zeros(1), torch.zeros(1)]
        unscale(gradient, found[0], 0.25)
        unscale(plain, found[1], 0.25)
        assert gradient._version == plain._version
        assert torch.equal(*found) and bool(found[0]) == (bad is not None and step == 3)
        assert gradient.norm().view(torch.int32) == plain.norm().view(torch.int32)
        fetches.append(len(evicter.fetched))
        assert gradient.view(torch.int32).tolist() == plain.view(torch.int32).tolist()
        evicter.fetched.clear()
        evicter.end_step()
    assert fetches == [1, 0, 0, 0]


def test_check_does_not_clear_what_another_gradient_has_found(evicter: Evicter) -> None:
    found = torch.ones(1)
    for _ in range(2):
        gradient = evicter.make(values())
        evicter.evict(gradient)
        unscale(gradient, found, 0.5)
        evicter.end_step()
    assert found.item() == 1.0 and len(evicter.fetched) == 1


def test_check_needs_no_fetch_if_the_scale_changes(evicter: Evicter) -> None:
    for scale in (0.5, 0.25, 3.0):
        gradient, found = evicter.make(values()), torch.zeros(1)
        evicter.evict(gradient)
        unscale(gradient, found, scale)
        assert found.item() == 0.0
        evicter.end_step()
    assert len(evicter.fetched) == 1
    assert torch.equal(gradient, values().mul_(3.0))
