"""Training loops of other libraries with a small Llama. Each loop runs plainly and within a budget.

    python trainers.py FOLDER NAME...

The script prints one JSON object: plain|teraio -> name -> losses, weights, counts. The loops are unchanged.
Only the call of `model.compile(...)` before a loop selects teraio. With Hugging Face's Trainer,
TeraioCallback makes this call, and leaves the plain model, which is compiled already, as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

MEMORY = "12MiB"  # teraio reserves 4 MiB; the plain run's weights, gradients and states take 14 MiB
INNER = "eager"
VOCABULARY, LENGTH, BATCH, STEPS = 256, 64, 4, 6

Loop = Callable[[torch.nn.Module, Path], list[Any]]


class Texts(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def llama(layers: int = 4) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def compiled(mode: str, module: torch.nn.Module) -> torch.nn.Module:
    if mode == "plain":
        module.compile(backend="aot_eager")
    else:
        module.compile(backend="teraio", options={"memory": MEMORY, "inner": INNER})
    return module


# ---- loops


def trainer(model: torch.nn.Module, folder: Path) -> list[Any]:
    """Train with Hugging Face's Trainer: accumulation, clipping, evaluation, a checkpoint halfway, and worker
    processes that load data.
    """
    log = _trainer(model, folder).state.log_history
    return [[entry.get(key) for key in ("loss", "grad_norm", "eval_loss")] for entry in log]


def resumed(model: torch.nn.Module, folder: Path) -> list[Any]:
    """Resume from the checkpoint of `trainer`, and train the second half again."""
    log = _trainer(model, folder, folder / f"checkpoint-{STEPS // 2}").state.log_history
    return [[entry.get(key) for key in ("loss", "grad_norm", "eval_loss")] for entry in log]


def _trainer(model: torch.nn.Module, folder: Path, checkpoint: Path | None = None) -> Any:
    from transformers import Trainer, TrainingArguments

    from teraio.integrations.transformers import TeraioCallback

    settings = TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        eval_strategy="steps",
        eval_steps=STEPS // 2,
        save_steps=STEPS // 2,
        logging_steps=1,
        learning_rate=1e-3,
        dataloader_num_workers=1,
        report_to=[],
        use_cpu=True,
        seed=0,
        disable_tqdm=True,
    )
    callback = TeraioCallback(memory=MEMORY, inner=INNER)
    texts = {"train_dataset": Texts(64, 1), "eval_dataset": Texts(8, 2)}
    made = Trainer(model, settings, callbacks=[callback], **texts)
    made.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return made


def accelerated(model: torch.nn.Module, folder: Path, precision: str = "no") -> list[Any]:
    """Train with accelerate: accumulation, clipping, a schedule, and accelerate's state saved and loaded."""
    from accelerate import Accelerator

    owner = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    texts = DataLoader(Texts(2 * BATCH * STEPS, 1), batch_size=BATCH)
    model, optimizer, texts, schedule = owner.prepare(model, optimizer, texts, schedule)
    losses = []
    for batch in texts:
        with owner.accumulate(model):
            loss = model(**batch).loss
            owner.backward(loss)
            if owner.sync_gradients:
                owner.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    owner.save_state(str(folder))
    owner.load_state(str(folder))
    return losses


def lightning(model: torch.nn.Module, folder: Path) -> list[Any]:
    """Train a Lightning module with accumulation, clipping, validation and a checkpoint."""
    import lightning as pl

    losses: list[Any] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            losses.append(self.model(**batch).loss.item())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    owner = pl.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        default_root_dir=str(folder),
    )
    owner.fit(Module(), DataLoader(Texts(64, 1), batch_size=BATCH), DataLoader(Texts(8, 2), batch_size=BATCH))
    owner.save_checkpoint(folder / "last.ckpt")
    return losses


def plain_loop(model: torch.nn.Module, folder: Path, make: Any = torch.optim.AdamW) -> list[Any]:
    """Train in a loop like that of a torchtune recipe: clipping, a step, and gradients set to None."""
    optimizer = make([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for batch in DataLoader(Texts(BATCH * STEPS, 1), batch_size=BATCH):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def quantized(name: str) -> Loop:
    def loop(model: torch.nn.Module, folder: Path) -> list[Any]:
        import torchao.optim

        return plain_loop(model, folder, getattr(torchao.optim, name))

    return loop


# ---- models


def whole(mode: str) -> torch.nn.Module:
    return compiled(mode, llama())


def uncompiled_for_teraio(mode: str) -> torch.nn.Module:
    """Return a model that only the plain run compiles here. Otherwise TeraioCallback compiles it."""
    return llama() if mode == "teraio" else compiled(mode, llama())


def blocks(mode: str) -> torch.nn.Module:
    """Compile each layer separately, as torchtune and torchtitan do."""
    model = llama()
    for layer in model.model.layers:
        compiled(mode, layer)
    return model


def adapted(mode: str) -> torch.nn.Module:
    """Return a model with low-rank adapters. All weights except the adapters are frozen."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=8, target_modules=["q_proj", "up_proj"], lora_dropout=0.1))
    return compiled(mode, model)


ROWS: dict[str, tuple[Callable[[str], torch.nn.Module], Loop]] = {
    "trainer": (uncompiled_for_teraio, trainer),
    "resumed": (uncompiled_for_teraio, resumed),  # uses the checkpoint in the folder of `trainer`
    "accelerate": (whole, accelerated),
    "accelerate bf16": (whole, partial(accelerated, precision="bf16")),
    "blocks": (blocks, plain_loop),
    "lightning": (whole, lightning),
    "peft": (adapted, plain_loop),
    "torchao AdamW8bit": (whole, quantized("AdamW8bit")),
    "torchao AdamWFp8": (whole, quantized("AdamWFp8")),
}


def digest(model: torch.nn.Module) -> str:
    """Return a hash of all weights."""
    weights = hashlib.sha256()
    for value in model.state_dict().values():
        weights.update(bytes(value.detach().clone().contiguous().view(-1).view(torch.uint8).numpy()))
    return weights.hexdigest()


def run(mode: str, folder: Path, name: str) -> dict[str, Any]:
    import teraio

    make, loop = ROWS[name]
    model = make(mode)
    torch.manual_seed(1)
    losses = loop(model, folder / name.replace("resumed", "trainer"))
    weights = digest(model)
    counts = teraio.stats() if mode == "teraio" else {}
    del model
    torch._dynamo.reset()
    return {"losses": losses, "weights": weights, "counts": counts}


def main() -> None:
    folder, *names = sys.argv[1:]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    results = {
        mode: {name: run(mode, Path(folder) / mode, name) for name in names} for mode in ("plain", "teraio")
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
