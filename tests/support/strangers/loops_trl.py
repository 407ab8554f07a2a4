"""Training loops that TRL, Hugging Face's trainer and PEFT contain."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from strangers.case import Compile

Loop = Callable[[Compile], Iterable[Any]]

WORDS, LENGTH, STEPS = 256, 24, 4
ASKED: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": STEPS,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "seed": 0,
    "disable_tqdm": True,
    "save_strategy": "no",
}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({str(number): number for number in range(WORDS)}, unk_token="0"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="0", eos_token="1", unk_token="0")


def tokens(count: int, length: int = LENGTH, seed: int = 1) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(seed)
    found: list[list[int]] = torch.randint(2, WORDS, (count, length), generator=drawn).tolist()
    return found


def results(trainer: Any) -> list[Any]:
    """Return the trainer's logged values, its trained weights and its optimizer."""
    keys = ("loss", "grad_norm", "eval_loss", "rewards/margins")
    logged = [entry.get(key) for entry in trainer.state.log_history for key in keys]
    weights = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    return [*(float(each) for each in logged if each is not None), weights, trainer.optimizer]


def sft(compile: Compile, checkpointing: bool, **more: Any) -> Iterable[Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model: Any = compile(llama())
    data = Dataset.from_dict({"input_ids": tokens(16)})
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(folder, gradient_checkpointing=checkpointing, max_length=LENGTH, **ASKED | more)
        trainer = SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer())
        trainer.train()
    return results(trainer)


def dpo(compile: Compile, lora: bool) -> Iterable[Any]:
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from trl import DPOConfig, DPOTrainer

    def texts(seed: int) -> list[str]:
        return [" ".join(map(str, row)) for row in tokens(16, 8, seed)]

    model = llama()
    given: dict[str, Any] = {}
    if lora:
        settings = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, settings)
    else:
        given = {"ref_model": compile(llama())}
    compile(model)
    rejected = [" " + text for text in texts(3)]
    pairs = {"prompt": texts(1), "chosen": [" " + text for text in texts(2)], "rejected": rejected}
    data = Dataset.from_dict(pairs)
    with tempfile.TemporaryDirectory() as folder:
        trainer = DPOTrainer(
            model,
            args=DPOConfig(folder, gradient_checkpointing=False, **ASKED),
            train_dataset=data,
            processing_class=tokenizer(),
            **given,
        )
        trainer.train()
    return results(trainer)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        self.tokens = torch.tensor(tokens(count, seed=seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def hugging_face(compile: Compile, **more: Any) -> Iterable[Any]:
    """Train with Hugging Face's Trainer, with evaluation."""
    from transformers import Trainer, TrainingArguments

    model = compile(llama())
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(folder, eval_strategy="steps", eval_steps=2, **ASKED | more)
        trainer = Trainer(model, settings, train_dataset=Rows(16, 1), eval_dataset=Rows(4, 2))
        trainer.train()
    return results(trainer)


def adapted(compile: Compile, make: Callable[[], Any]) -> Iterable[Any]:
    """Train a PEFT adapter in a plain loop. At the end, merge the adapter into the model if its kind allows
    that.
    """
    from peft import get_peft_model

    model: Any = get_peft_model(llama(), make())
    compile(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for row in torch.tensor(tokens(2 * STEPS)).view(STEPS, 2, LENGTH):
        loss = model(input_ids=row, labels=row).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
    yield from (model, optimizer)
    if hasattr(model, "merge_and_unload") and not model.active_peft_config.is_prompt_learning:
        yield model.merge_and_unload()


def _lora(**more: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", **more)


def _ia3() -> Any:
    from peft import IA3Config

    targets = ["k_proj", "v_proj", "down_proj"]
    return IA3Config(task_type="CAUSAL_LM", target_modules=targets, feedforward_modules=["down_proj"])


def _prefix() -> Any:
    from peft import PrefixTuningConfig

    return PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)


def _prompt() -> Any:
    from peft import PromptTuningConfig

    return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)


LOOPS: dict[str, Loop] = {
    "sft": partial(sft, checkpointing=False),
    "sft_checkpointing": partial(sft, checkpointing=True),
    "sft_accumulates": partial(sft, checkpointing=False, gradient_accumulation_steps=2),
    "dpo": partial(dpo, lora=False),
    "dpo_lora": partial(dpo, lora=True),
    "hugging_face_neftune": partial(hugging_face, neftune_noise_alpha=5.0),
    "hugging_face_adafactor": partial(hugging_face, optim="adafactor", label_smoothing_factor=0.1),
    "peft_lora": partial(adapted, make=partial(_lora, lora_dropout=0.1)),
    "peft_dora": partial(adapted, make=partial(_lora, use_dora=True)),
    "peft_ia3": partial(adapted, make=_ia3),
    "peft_prefix": partial(adapted, make=_prefix),
    "peft_prompt": partial(adapted, make=_prompt),
}
