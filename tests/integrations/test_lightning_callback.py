"""TeraioCallback in Lightning's Trainer: it compiles what `training_step` calls, and logs figures."""

from __future__ import annotations

import copy
import csv
from pathlib import Path
from typing import Any

import lightning as pl
import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import teraio
from teraio.integrations.compiled_models import compile_and_note
from teraio.integrations.lightning import TeraioCallback

WIDTH, LAYERS, STEPS = 128, 6, 4

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
]


class Parts(pl.LightningModule):
    """A LightningModule whose `training_step` calls its children."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.heads = torch.nn.ModuleList([torch.nn.Linear(WIDTH, 1)])

    def predict(self, inputs: torch.Tensor) -> Any:
        return self.heads[0](self.net(inputs))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = functional.mse_loss(self.predict(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", functional.mse_loss(self.predict(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Whole(Parts):
    """A LightningModule that is the model itself, and made late."""

    def __init__(self) -> None:
        super().__init__()
        self.late: torch.nn.Module | None = None

    def configure_model(self) -> None:
        if self.late is None:
            torch.manual_seed(1)
            self.late = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> Any:
        assert self.late is not None
        return super().predict(functional.relu(self.late(inputs)))

    def predict(self, inputs: torch.Tensor) -> Any:
        return self(inputs)


def fit(module: Any, folder: Path, *callbacks: Any) -> tuple[list[dict[str, str]], list[torch.Tensor]]:
    """Train, and return the rows of Lightning's log and the weights at the end."""
    torch.manual_seed(2)
    texts = DataLoader(TensorDataset(torch.randn(32, WIDTH), torch.randn(32, 1)), batch_size=4)
    logger = pl.pytorch.loggers.CSVLogger(folder)
    trainer = pl.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        logger=logger,
        log_every_n_steps=1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[*callbacks],
    )
    trainer.fit(module, texts, texts)
    trainer.save_checkpoint(folder / "last.ckpt")
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = [*csv.DictReader(file)]
    return rows, [*torch.load(folder / "last.ckpt")["state_dict"].values()]


def callback(**more: Any) -> Any:
    return TeraioCallback(memory="min", inner="eager", warmup=1, planner="greedy", **more)


@pytest.mark.parametrize("kind", [Parts, Whole])
def test_training_within_budget_equals_plain_training_and_is_logged(
    kind: type[Parts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = kind()
    rows, weights = fit(module, tmp_path / "within", callback())
    stats = teraio.stats()
    assert stats["evictions"] > 5 and len(module.state_dict()) == len(weights)
    assert not any("_orig_mod" in key for key in module.state_dict())
    figures = [row for row in rows if row.get("teraio/step_seconds")]
    assert len(figures) == STEPS
    assert all(float(row["teraio/step_peak_bytes"]) <= stats["budget_bytes"] for row in figures)
    twin = copy.deepcopy(module.net)
    assert module.net._compiled_call_impl is not None and twin._compiled_call_impl is None

    teraio.reset()
    torch._dynamo.reset()
    monkeypatch.setenv("TERAIO_DISABLE", "1")
    plain_rows, plain_weights = fit(kind(), tmp_path / "plain", callback())
    numbers = [[row["loss"] for row in log if row.get("loss")] for log in (rows, plain_rows)]
    assert numbers[0] == numbers[1] and len(numbers[0]) == STEPS
    assert [row["val_loss"] for row in rows if row.get("val_loss")] == [
        row["val_loss"] for row in plain_rows if row.get("val_loss")
    ]
    assert all(torch.equal(one, other) for one, other in zip(weights, plain_weights, strict=True))
    assert not any(name.startswith("teraio/") for row in plain_rows for name in row)


def compiled_names(module: torch.nn.Module) -> list[str]:
    return [name for name, each in module.named_modules() if each._compiled_call_impl is not None]


class Single:
    """A Trainer, as far as `setup` reads it."""

    class SingleDeviceStrategy: ...

    class DDPStrategy: ...

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy


def test_modules_to_compile_depend_on_forward_and_strategy() -> None:
    single, wrapped = Single(Single.SingleDeviceStrategy()), Single(Single.DDPStrategy())
    for module, trainer, expected in (
        (Parts(), single, ["net", "heads.0"]),
        (Whole(), single, ["", "net", "heads.0"]),
        (Whole(), wrapped, ["net", "heads.0"]),
    ):
        callback().setup(trainer, module, "fit")
        assert compiled_names(module) == expected
    named = Parts()
    callback(modules=["net"]).setup(single, named, "fit")
    assert compiled_names(named) == ["net"]
    with pytest.raises(teraio.errors.OptionError, match="Parts has no module 'nett'; its children are net"):
        callback(modules=["nett"]).setup(single, Parts(), "fit")


def test_module_that_is_already_compiled_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    single, module = Single(Single.SingleDeviceStrategy()), Parts()
    module.heads[0].compile(backend="eager")
    callback().setup(single, module, "fit")
    assert compiled_names(module) == ["heads.0"]
    assert "because its module 'heads.0' is already compiled; its options have no effect" in caplog.text
    caplog.clear()
    other = Parts()
    compile_and_note(other.net, {"memory": "1GiB"})
    callback().setup(single, other, "fit")
    assert "because its module 'net' is already compiled" in caplog.text


def test_callback_is_one_of_the_imported_package() -> None:
    assert isinstance(callback(), pl.Callback)
