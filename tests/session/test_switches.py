"""Tests of TERAIO_WITHOUT, which disables single features. A disabled feature changes no numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import teraio
from teraio import switches
from teraio.errors import OptionError
from teraio.options import Settings
from teraio.runtime.eager.gradients import Gradients
from teraio.runtime.eager.user_code import UserCode
from teraio.runtime.optimizer.step_call import OptimizerCall
from teraio.runtime.step.prefetch import Prefetch
from teraio.runtime.step.quiet_call import QuietCall
from teraio.session import session

WIDTH, BLOCKS, STEPS = 192, 6, 4
# Pairs (budget in bytes, batch): a tight budget, an ample one, and a tight one for weights alone. Weights,
# gradients and optimizer states take 6.5 MiB. teraio reserves 4 MiB for other memory.
Setting = tuple[int, int]
TIGHT, ROOM, WEIGHTS = (8 * 2**20, 256), (64 * 2**20, 256), (7 * 2**20, 32)
SETTINGS = {"quiet_calls": ROOM, "buckets": ROOM, "gradient_calls": WEIGHTS}  # of other features: TIGHT


class Block(nn.Module):
    """A block of the model. Each block is compiled by itself, so that compiled programs pass results to each
    other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(F.gelu(self.one(x)))


def counted(
    method: Callable[..., Any], count: Callable[[Any, Any], int]
) -> tuple[Callable[..., Any], list[int]]:
    """Return a pair: a wrapper of the method, and a list. After each call of the method, the wrapper appends
    `count(object, result)` to the list."""
    found: list[int] = []

    def call(self: Any, *args: Any) -> Any:
        result = method(self, *args)
        found.append(count(self, result))
        return result

    return call, found


@contextmanager
def seen() -> Iterator[Counter[str]]:
    """Yield a counter. When the block ends, the counter gets each feature's number of events. A disabled
    feature has none."""
    spies: dict[str, tuple[type, str, Callable[[Any, Any], int]]] = {
        "quiet_calls": (QuietCall, "begin_if_quiet", lambda call, _: call.program is not None),
        "prefetch": (Prefetch, "_try_fetch_ahead", lambda _, begun: bool(begun)),
        "early_gradients": (Gradients, "weight_of_early_edge", lambda _, weight: weight is not None),
        "results": (UserCode, "reclaim_result", lambda _, moves: bool(moves)),
        "buckets": (OptimizerCall, "close_bucket", lambda call, _: len(call.buckets) > 1),
    }
    lists: dict[str, list[int]] = {}
    total: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patched:
        for name, (kind, method, count) in spies.items():
            call, lists[name] = counted(getattr(kind, method), count)
            patched.setattr(kind, method, call)
        yield total
    total.update({name: sum(found) for name, found in lists.items()})


def trained(setting: Setting) -> tuple[list[torch.Tensor], Counter[str]]:
    """Train with user code that reads the gradients.

    Return a pair: the losses and weights, and the number of events of each feature.
    """
    memory, batch = setting
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    for block in model:
        block.compile(
            backend="teraio", options={"inner": "eager", "memory": memory, "warmup": 1, "planner": "none"}
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(1)
    losses = []
    with seen() as found:
        for _ in range(STEPS):
            for _ in range(2):
                loss = model(torch.randn(batch, WIDTH, generator=batches)).square().mean()
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    assert session.SESSION is not None
    calls = [call for _, step in session.SESSION.sources() for call in step.calls]
    found["gradient_calls"] = teraio.stats()["owed_scalings"] + teraio.stats()["remembered_norms"]
    found["slots"] = sum(len(call.schedule.slots) > 3 for call in calls if call.schedule.kind == "forward")
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    teraio.reset()
    torch._dynamo.reset()
    return [*losses, *weights], found


@pytest.fixture(scope="module", autouse=True)
def one_thread_for_all() -> Iterator[None]:
    """Set torch to one thread, also for the fixture `whole`, so that sums are bit-equal."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole() -> dict[Setting, tuple[list[torch.Tensor], Counter[str]]]:
    """Return, for each setting, the result of a training with all features."""
    return {setting: trained(setting) for setting in (TIGHT, ROOM, WEIGHTS)}


@pytest.mark.parametrize("feature", switches.FEATURES)
def test_disabled_feature_is_unused_and_keeps_numbers(
    feature: str, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = SETTINGS.get(feature, TIGHT)
    expected, used = whole[setting]
    assert used[feature] > 0, "the training does not show this feature"
    monkeypatch.setenv(switches.VARIABLE, f" {feature.upper()} ,")
    found, left = trained(setting)
    assert left[feature] == 0
    assert all(map(torch.equal, found, expected))


def test_unknown_feature_is_refused_with_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    assert switches.disabled_features({}) == frozenset()
    with pytest.raises(
        OptionError, match=r"TERAIO_WITHOUT: 'prefech' is not a feature; did you mean prefetch"
    ):
        switches.disabled_features({switches.VARIABLE: "prefech"})


def test_null_store_keeps_numbers(
    whole: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TERAIO_STORE", "null")
    assert Settings.parse({}).store_directories == ()
    found, _ = trained(TIGHT)
    assert all(map(torch.equal, found, whole[TIGHT][0]))
    assert "evicted bytes are kept in this process's memory" in caplog.text
