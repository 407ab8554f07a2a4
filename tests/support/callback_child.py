"""Trainings with TeraioCallback of transformers. The last line of the output is one JSON object:
TERAIO_DISABLE -> name -> result.

    python callback_child.py FOLDER adapted logged adapted=1

`adapted=1` runs `adapted` with TERAIO_DISABLE=1.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trainers
from transformers import Trainer, TrainerCallback, TrainingArguments

import teraio
from teraio.integrations.transformers import TeraioCallback

STEPS = 4
MEMORY = "min"  # so some tensors are evicted, although the models are tiny


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    return TrainingArguments(str(folder), **{**settings, **changes})


def trainer(model: Any, args: TrainingArguments, *callbacks: TrainerCallback, **more: Any) -> Trainer:
    texts = {"train_dataset": trainers.Texts(64, 1), "eval_dataset": trainers.Texts(8, 2)}
    return Trainer(model, args, callbacks=list(callbacks), **texts, **more)


def callback() -> TeraioCallback:
    return TeraioCallback(memory=MEMORY, inner="eager")


class Tiny(torch.nn.Module):
    """A model that compiles in a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(trainers.VOCABULARY, 64)
        self.head = torch.nn.Linear(64, trainers.VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Seen(TrainerCallback):
    """A callback of the user, which keeps each log as it gets it."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def result(made: Trainer, **more: Any) -> dict[str, Any]:
    return {
        "history": made.state.log_history,
        "weights": trainers.digest(made.model),
        "keys": list(made.model.state_dict()),
        "counts": dict(teraio.stats()),
        **more,
    }


def adapted(folder: Path) -> dict[str, Any]:
    """Train a PEFT model with gradient checkpointing and clipping."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    lora = LoraConfig(r=8, target_modules=["q_proj", "up_proj"], lora_dropout=0.1)
    model = get_peft_model(trainers.llama(layers=1), lora)
    changes = {"gradient_checkpointing": True, "max_grad_norm": 0.01, "max_steps": 3}
    made = trainer(model, arguments(folder, **changes), callback())
    made.train()
    return result(made)


def logged(folder: Path) -> dict[str, Any]:
    """Train with accumulation and evaluation, and log to TensorBoard and to a callback of the user. The
    callback of teraio comes last."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    torch.manual_seed(1)
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2}
    seen = Seen()
    args = arguments(folder / "logged", report_to=["tensorboard"], **evaluation)
    made = trainer(Tiny(), args, seen, callback())
    made.train()
    events = EventAccumulator(next(str(path.parent) for path in (folder / "logged").rglob("events.*")))
    events.Reload()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return result(made, scalars=scalars, seen=seen.logs)


def from_model_init(folder: Path) -> dict[str, Any]:
    """Train a model that the Trainer makes itself, with a callback that is added later."""
    made = trainer(None, arguments(folder, max_steps=2), model_init=Tiny)
    made.add_callback(callback())
    made.train()
    return result(made)


def refusals(folder: Path) -> dict[str, Any]:
    """Return the messages of wrong uses, and what the callback does to a model that is compiled already."""
    found: dict[str, Any] = {}

    def message(name: str, attempt: Callable[[], Any]) -> None:
        try:
            attempt()
        except (teraio.errors.TeraioError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    model = Tiny()
    message("torch_compile", lambda: trainer(model, arguments(folder, torch_compile=True), callback()))
    message("option", lambda: TeraioCallback(memroy="1GiB"))
    named = arguments(folder, torch_compile_backend="teraio")
    message("accelerate", lambda: trainer(model, named))
    found["untouched"] = model._compiled_call_impl is None
    lines = Lines()
    logging.getLogger("teraio").addHandler(lines)
    model.head.compile(backend="eager")
    before = model.head._compiled_call_impl
    for _ in range(2):
        made = trainer(model, arguments(folder), callback())
    found["compiled"] = [model._compiled_call_impl is None, model.head._compiled_call_impl is before]
    found["lines"] = lines.texts
    mine, again = callback(), callback()
    fresh = Tiny()
    made = trainer(fresh, arguments(folder), mine)
    call = fresh._compiled_call_impl
    trainer(fresh, arguments(folder), again)
    found["second"] = [call is not None, fresh._compiled_call_impl is call, len(lines.texts)]
    found["first in order"] = made.callback_handler.callbacks[0] is mine
    mine._move_to_front(None)
    found["no list"] = lines.texts[-1]
    return found


ROWS = {"adapted": adapted, "logged": logged, "model_init": from_model_init, "refusals": refusals}


class Lines(logging.Handler):
    """The log lines of teraio."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {"": {}, "1": {}}
    for run in sys.argv[2:]:
        name, _, disabled = run.partition("=")
        os.environ["TERAIO_DISABLE"] = disabled
        results[disabled][name] = ROWS[name](folder / f"run{disabled}")
        teraio.reset()
        torch._dynamo.reset()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
