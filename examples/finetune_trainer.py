"""A fine-tuning of a causal language model with Hugging Face's Trainer, with evaluation, checkpoints and
resuming.

Only one argument of the Trainer mentions teraio: the callback, which compiles the model.

python examples/finetune_trainer.py --memory 100MiB                       # a random Llama that reads bytes
python examples/finetune_trainer.py --memory 100MiB --steps 30 --resume   # resumes from its last checkpoint
python examples/finetune_trainer.py --memory 8GiB --model folder --text book.txt
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from side_by_side import (
    arguments,
    equal,
    exit_for_import_error,
    mib,
    model_folder,
    size_bytes,
    sizes,
    table,
    without_teraio,
)
from torch import nn

try:
    import accelerate  # noqa: F401  the Trainer needs it
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from teraio.integrations.transformers import TeraioCallback
except ImportError as error:
    raise exit_for_import_error(error, "transformers", "accelerate") from error

Texts = list[dict[str, torch.Tensor]]


def texts(args: argparse.Namespace) -> Texts:
    """Return the text in pieces: tokens of the model's tokenizer, or bytes if the model is random."""
    text = args.text.read_text() if args.text else "".join(f"{n} + {n * 7} = {n * 8}\n" for n in range(9999))
    if args.model:
        ids = AutoTokenizer.from_pretrained(args.model, local_files_only=True)(text)["input_ids"]
    else:
        ids = list(text.encode())
    pieces = torch.tensor(ids[: len(ids) // args.length * args.length]).view(-1, args.length)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def make_model(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, local_files_only=True)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=args.length,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config)


def losses(model: nn.Module, args: argparse.Namespace, start: str | None, save: str) -> list[dict[str, Any]]:
    """Train from the checkpoint `start`, or from new weights if `start` is None. Return the losses from the
    Trainer's log.
    """
    settings = TrainingArguments(
        str(args.output),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        # A linear schedule depends on --steps, which differs in a resumed run
        lr_scheduler_type="constant",
        learning_rate=args.rate,
        eval_strategy="steps",
        eval_steps=args.every,
        save_strategy=save,
        save_steps=args.every,
        save_total_limit=1,
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        seed=0,
    )
    pieces = texts(args)
    kept = min(len(pieces) // 10 + 1, 4 * args.batch)
    texts_of = {"train_dataset": pieces[kept:], "eval_dataset": pieces[:kept]}
    callback = TeraioCallback(memory=args.memory, inner=args.inner)
    trainer = Trainer(model, settings, callbacks=[callback], **texts_of)
    trainer.train(resume_from_checkpoint=start)
    names = ("step", "loss", "grad_norm", "eval_loss")
    return [{name: entry.get(name) for name in names} for entry in trainer.state.log_history]


def main() -> None:
    parser = arguments(__doc__ or "", memory="100MiB", steps=20)
    parser.add_argument(
        "--model", type=model_folder, help="a folder with a model and its tokenizer; default: a random Llama"
    )
    parser.add_argument("--text", type=Path, help="a text file; default: lines of sums")
    parser.add_argument("--output", type=Path, default=Path("finetuned"), help="folder for checkpoints")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint")
    parser.add_argument("--plain", action="store_true", help="also train without a budget, and compare")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    sizes(parser, hidden=256, layers=8, heads=4, batch=4, length=256, every=10)
    args = parser.parse_args()
    torch.set_num_threads(1)  # with two threads, sums differ in the last bit from run to run

    start = get_last_checkpoint(args.output) if args.resume and args.output.is_dir() else None
    if args.resume and start is None:
        parser.error(f"no checkpoint in {args.output}: train without --resume first")
    if args.plain:
        with without_teraio():
            plain = losses(make_model(args), args, start, save="no")
    model = make_model(args)
    ours = losses(model, args, start, save="steps")
    rows = {"losses_equal_plain_ones": equal(ours, plain)} if args.plain else {}
    last = [next(e[name] for e in reversed(ours) if e[name] is not None) for name in ("loss", "eval_loss")]
    table(
        weights_gradients_and_states=mib(4 * size_bytes(model)),
        began_with=start or "new weights",
        steps=str(ours[-1]["step"]),
        last_loss_and_evaluation="{:.4f}, {:.4f}".format(*last),
        checkpoint=str(get_last_checkpoint(args.output)),
        **rows,
    )


if __name__ == "__main__":
    main()
