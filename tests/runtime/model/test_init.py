"""Models constructed within the budget. Their weights equal the weights of a construction without teraio."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import teraio
from teraio.errors import OptionError, UnsupportedError
from teraio.runtime.engine import engine
from teraio.runtime.ledger import adoption
from teraio.runtime.ledger.record import State
from teraio.runtime.model import init
from teraio.runtime.model.init import Construction
from teraio.session import session

MEMORY = 6 << 20  # bytes of the budget; the reserve takes 4 MiB of them
OPTIONS: dict[str, Any] = {"memory": str(MEMORY), "inner": "eager", "planner": "none"}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Scaled(nn.Module):
    """A model with computed weights, buffers, and one weight that two modules use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 256)
        self.deltas = nn.ParameterList([nn.Parameter(torch.randn(256, 256) * 0.02 + 1) for _ in range(5)])
        self.register_buffer("mask", torch.ones(384, 256).tril())
        self.register_buffer("gone", torch.rand(256, 256), persistent=False)
        self.head = nn.Linear(256, 512, bias=False)
        self.head.weight = self.embed.weight


class Written(nn.Module):
    """A model whose constructor writes to its weights in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 512) for _ in range(8))
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            weight = layer.weight
            match number:
                case 0:
                    nn.init.orthogonal_(weight)
                case 1:
                    nn.init.trunc_normal_(weight, std=0.02)
                case 2:
                    weight.data.normal_(std=0.02)
                case 3:
                    weight.data = torch.randn(512, 256)
                case 4:
                    with torch.no_grad():
                        weight.copy_(torch.randn(512, 256)).mul_(0.1)
                case 5:
                    layer.weight = nn.Parameter(weight.detach().clone() + 1)
                case 6:
                    weight.data[:, 3] = 0
                case 7:
                    layer.load_state_dict(self.layers[0].state_dict())


def apart() -> nn.Module:
    """Return a model with lazy modules and copied modules.

    The model is converted to float64 and back to float32.
    """
    layer = nn.TransformerEncoderLayer(128, 2, 512, batch_first=True)
    lazy = nn.Sequential(*(nn.LazyLinear(256) for _ in range(4)))
    with torch.no_grad():
        lazy(torch.randn(2, 256))
    model = nn.ModuleList([nn.TransformerEncoder(layer, 4), copy.deepcopy(lazy), nn.LSTM(128, 128), lazy])
    return model.to(torch.float64).to(torch.float32)


RECIPES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(*(nn.Linear(256, 512) for _ in range(10))),
    "scaled": Scaled,
    "written": Written,
    "apart": apart,
}


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    found = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return dict(found)


def evicted_count() -> int:
    assert engine.ENGINE is not None
    return sum(record.state is State.EVICTED for record in engine.ENGINE.residency.records.values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_construction_gives_the_plain_numbers_within_the_budget(recipe: str) -> None:
    torch.manual_seed(0)
    plain = RECIPES[recipe]()
    after = torch.rand(4)
    size_bytes = sum(t.nbytes for t in {id(t): t for t in tensors(plain).values()}.values())
    assert size_bytes > MEMORY - (4 << 20)
    torch.manual_seed(0)
    with teraio.init(**OPTIONS):
        ours = RECIPES[recipe]()
    assert torch.equal(after, torch.rand(4)), "another number of random numbers was drawn"
    counts = teraio.stats()
    assert counts["overrun_bytes"] == 0
    assert counts["resident_bytes"] <= counts["peak_bytes"] <= MEMORY
    assert evicted_count() > 0
    expected, got = tensors(plain), tensors(ours)
    assert expected.keys() == got.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, expected[name]), name
        assert isinstance(tensor, nn.Parameter) == isinstance(expected[name], nn.Parameter)
    if recipe == "scaled":
        assert got["head.weight"] is got["embed.weight"]


def test_model_from_before_the_block_moves_within_the_budget() -> None:
    model = RECIPES["linear"]()
    expected = {name: tensor.double() for name, tensor in tensors(model).items()}
    with teraio.init(**OPTIONS):
        model.double()
    counts = teraio.stats()
    assert counts["overrun_bytes"] == 0 and counts["peak_bytes"] <= MEMORY
    assert evicted_count() > 0
    for name, tensor in tensors(model).items():
        assert tensor.dtype is torch.float64 and torch.equal(tensor, expected[name]), name


def test_construction_without_evictions_exceeds_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Construction, "make_room", lambda *_: None)
    with teraio.init(**OPTIONS):
        model = RECIPES["linear"]()
    assert teraio.stats()["resident_bytes"] > MEMORY - (4 << 20)
    assert evicted_count() == 0
    del model


class Net(nn.Module):
    """A model with a buffer. The buffer gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(128, 512, bias=False) for _ in range(8))
        self.down = nn.ModuleList(nn.Linear(512, 128, bias=False) for _ in range(8))
        self.register_buffer("shift", torch.rand(16, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down):
            x = x + down(torch.relu(up(x))) * self.shift
        return x.square().mean()


def train(model: nn.Module, compiled: Callable[..., torch.Tensor], steps: int = 4) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = compiled(torch.randn(16, 128, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_compile_takes_constructed_weights_over_and_trains_beyond_memory() -> None:
    torch.manual_seed(0)
    plain = Net()
    expected = train(plain, torch.compile(plain, backend="aot_eager"))
    torch._dynamo.reset()
    torch.manual_seed(0)
    with teraio.init(**OPTIONS):
        ours = Net()
    first = engine.ENGINE
    assert first is not None and first.mover.store.total_written_bytes > 0
    known = dict(first.residency.records)
    assert train(ours, torch.compile(ours, backend="teraio")) == expected
    assert engine.ENGINE is first, "the compile started another session"
    weights = {r.name: r for r in first.residency.records.values() if r.kind == "weight"}
    assert weights.keys() == {name for name, _ in (*ours.named_parameters(), *ours.named_buffers())}
    assert all(known[record.key] is record for record in weights.values())
    for (name, tensor), other in zip(ours.named_parameters(), plain.parameters()):
        assert torch.equal(tensor, other), name
    assert teraio.stats()["overrun_bytes"] == 0, "weights beside a buffer counted as held by user code"
    assert teraio.stats()["peak_bytes"] <= MEMORY


def test_compile_with_other_options_than_init_is_refused() -> None:
    with teraio.init(**OPTIONS):
        model = Net()
    assert torch.compile(model, backend="teraio", options={"memory": str(MEMORY)})(torch.ones(16, 128)) > 0
    torch.compiler.reset()
    with teraio.init(**OPTIONS):
        model = Net()
    with pytest.raises(OptionError, match="other options"):
        torch.compile(model, backend="teraio", options={"memory": "1GiB"})(torch.ones(16, 128))


def test_error_in_a_constructor_leaves_no_hook_behind() -> None:
    with pytest.raises(ZeroDivisionError), teraio.init(**OPTIONS), teraio.init(**OPTIONS):
        nn.Linear(1 // 0, 1)
    modules = nn.modules.module
    assert not modules._global_parameter_registration_hooks
    assert not modules._global_buffer_registration_hooks
    layer = nn.Linear(256, 256)
    assert type(layer.weight) is nn.Parameter
    assert nn.Module._apply.__module__ == "torch.nn.modules.module"


@pytest.mark.parametrize("gpu", [False, True])
def test_budget_of_ram_beside_a_gpu_warns(gpu: bool, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with teraio.init(**OPTIONS), teraio.init(**OPTIONS):
        pass
    assert caplog.text.count("the budget limits RAM, because torch's default device is the CPU") == gpu


def test_init_with_teraio_disabled_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAIO_DISABLE", "1")
    with teraio.init(**OPTIONS):
        assert type(nn.Linear(256, 256).weight) is nn.Parameter
    assert session.SESSION is None


def test_all_weights_are_resident_after_a_reset() -> None:
    torch.manual_seed(0)
    plain = RECIPES["linear"]()
    torch.manual_seed(0)
    with teraio.init(**OPTIONS):
        ours = RECIPES["linear"]()
    teraio.reset()
    for one, other in zip(ours.parameters(), plain.parameters()):
        assert type(one) is nn.Parameter and torch.equal(one, other)


def test_weight_in_a_mapped_file_is_copied_to_memory_of_its_own(tmp_path: Any) -> None:
    file = tmp_path / "weights.pt"
    torch.save({f"{n}": torch.randn(256, 256) for n in range(12)}, file)
    mapped = torch.load(file, mmap=True)
    expected = torch.load(file)
    with teraio.init(**OPTIONS):
        model = nn.ParameterDict()
        while mapped:
            name, tensor = mapped.popitem()
            assert not adoption.is_resizable(tensor.untyped_storage())
            model[name] = nn.Parameter(tensor)
            del tensor
    assert evicted_count() > 0
    assert all(torch.equal(model[name], expected[name]) for name in expected)
    assert teraio.stats()["overrun_bytes"] == 0


class Coupled(torch.optim.SGD):
    """An optimizer whose update of one parameter depends on the gradients of all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            norm = sum(p.grad.norm() for p in parameters)
            for parameter in parameters:
                parameter.add_(parameter.grad / (norm + 1), alpha=-0.1)


def test_wrap_returns_the_optimizer_or_refuses_one_that_must_step_whole() -> None:
    model = nn.Linear(64, 64)
    adam = torch.optim.AdamW(model.parameters())
    assert teraio.wrap(adam) is adam
    for optimizer in (Coupled(model.parameters()), torch.optim.LBFGS(model.parameters())):
        with pytest.raises(UnsupportedError, match="whole=True"):
            teraio.wrap(optimizer)
        assert teraio.wrap(optimizer, whole=True) is optimizer


def test_wrapped_optimizer_that_must_step_whole_later_is_refused_before_the_step() -> None:
    with teraio.init(**OPTIONS):
        model = Net()
    optimizer = teraio.wrap(torch.optim.AdamW(model.parameters()))
    torch.compile(model, backend="teraio")(torch.ones(16, 128)).backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.param_groups[0]["differentiable"] = True
    with pytest.raises(UnsupportedError, match="differentiable"):
        optimizer.step()
    assert all(torch.equal(old, now) for old, now in zip(before, model.parameters()))
    optimizer.param_groups[0]["differentiable"] = False
    optimizer.step()
    assert not any(torch.equal(old, now) for old, now in zip(before, model.parameters()))


def test_hugging_face_model_is_constructed_and_loaded_within_the_budget(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape: Any = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6}
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(**shape, **heads, max_position_embeddings=64)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config)
    plain.save_pretrained(tmp_path, max_shard_size="2MB")
    torch.manual_seed(0)
    for from_file in (False, True):
        with teraio.init(**OPTIONS):
            if from_file:
                ours = AutoModelForCausalLM.from_pretrained(tmp_path)
            else:
                ours = AutoModelForCausalLM.from_config(config)
        assert evicted_count() > 0
        assert teraio.stats()["overrun_bytes"] == 0
        assert teraio.stats()["peak_bytes"] <= MEMORY
        got = tensors(ours)
        assert got.keys() == (expected := tensors(plain)).keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in got.items())
        del ours, got
        torch._dynamo.reset()


def test_device_block_inside_init_still_applies_to_new_tensors() -> None:
    """Run in a new process, because no device block may be used before the engine exists."""
    code = f"""if True:
        import torch, teraio
        with teraio.init(**{OPTIONS!r}), torch.device("meta"):
            assert torch.tensor([1.0]).is_meta and torch.nn.Linear(64, 64).weight.is_meta
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_bytes_of_an_operation_are_counted_on_the_device_that_allocates_them() -> None:
    """Use fake CUDA tensors, so that the test needs no GPU."""
    aten, on_gpu = torch.ops.aten, {"device": torch.device("cuda:0")}
    with FakeTensorMode():
        on_cuda = torch.empty(8, 4, device="cuda")
    on_cpu, factor = torch.ones(8, 4), torch.tensor(2.0)
    for func, args, kwargs, of_gpu, of_ram in (
        (aten.empty.memory_format, ([8, 4],), on_gpu, 128, 0),
        (aten.empty.memory_format, ([8, 4],), {}, 0, 128),
        (aten.add.Tensor, (on_cuda, on_cuda), {}, 128, 0),
        (aten.mul.Tensor, (on_cuda, factor), {}, 128, 0),
        (aten.add.Tensor, (on_cpu, factor), {}, 0, 128),
        (aten.randn_like.default, (on_cuda,), {}, 128, 0),
        (aten._to_copy.default, (on_cpu,), on_gpu, 128, 0),
        (aten.add_.Tensor, (on_cuda, on_cuda), {}, 0, 0),
    ):
        found = [init._bytes_to_allocate(func, args, kwargs, torch.device(on)) for on in ("cuda:0", "cpu")]
        assert found == [of_gpu, of_ram], func


def test_tensors_of_another_thread_are_not_registered() -> None:
    made: list[nn.Module] = []
    thread = threading.Thread(target=lambda: made.append(nn.Linear(256, 256)))
    with teraio.init(**OPTIONS):
        own = nn.Linear(256, 256)
        thread.start()
        thread.join()
    record_of = engine.ENGINE.residency.evictable_record_of  # type: ignore[union-attr]
    assert record_of(own.weight) is not None
    assert [record_of(weight) for weight in made[0].parameters()] == [None, None]
    teraio.reset()
