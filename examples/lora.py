"""A fine-tuning of a model that is larger than memory, with PEFT's low-rank adapters.

teraio fetches the frozen weights from their safetensors file in each step, and never writes them.

python examples/lora.py --memory 300MiB --hidden 1024 --layers 16      # 0.9 GiB of frozen weights
python examples/lora.py --memory 8GiB --model folder                   # config.json and safetensors files
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from side_by_side import (
    arguments,
    equal,
    exit_for_import_error,
    mib,
    model_folder,
    sizes,
    table,
    without_teraio,
)
from streaming_inference import write
from torch import nn

import teraio

try:
    from accelerate import init_empty_weights
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
except ImportError as error:
    raise exit_for_import_error(error, "peft", "transformers", "accelerate") from error


def make_config(args: argparse.Namespace) -> LlamaConfig:
    if args.model:
        return AutoConfig.from_pretrained(args.model, local_files_only=True, use_cache=False)
    return LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        use_cache=False,
    )


def make_model(weights: Path, args: argparse.Namespace, **options: str) -> nn.Module:
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(make_config(args))
    teraio.load(model, weights, memory=args.memory, inner=args.inner, **options)
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=args.rank, target_modules=["q_proj", "v_proj"]))


def losses(model: nn.Module, args: argparse.Namespace) -> Iterator[float]:
    model.compile(backend="teraio", options={"inner": args.inner})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    random = torch.Generator().manual_seed(1)
    for _ in range(args.steps):
        tokens = torch.randint(0, model.config.vocab_size, (args.batch, args.length), generator=random)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def frozen_bytes_moved(timeline: Path) -> dict[str, str]:
    """Return rows for the printed table: the bytes of frozen weights that a planned step read and wrote."""
    if not timeline.exists():
        return {"frozen_weights_moved": "no step was planned; give more --steps"}
    spans = [s for s in json.loads(timeline.read_text())["spans"] if s["tensor"].endswith(".weight")]
    rows = {}
    for name, track in {"read": "fetch:ssd", "written": "evict:ssd"}.items():
        moves = [s["bytes"] for s in spans if s["track"] == track and "lora_" not in s["tensor"]]
        rows[f"of_them_{name}_in_a_planned_step"] = mib(sum(moves))
    return rows


def main() -> None:
    parser = arguments(__doc__ or "", memory="300MiB", steps=8)
    parser.add_argument("--model", type=model_folder, help="a folder with a model; default: a random Llama")
    parser.add_argument("--plain", action="store_true", help="also train without a budget, and compare")
    sizes(parser, vocabulary=4096, hidden=1024, layers=16, heads=16, rank=8, batch=1, length=256)
    args = parser.parse_args()
    torch.set_num_threads(1)  # with two threads, sums differ in the last bit from run to run

    with tempfile.TemporaryDirectory() as folder:
        weights = args.model
        if weights is None:
            weights = Path(folder, "model.safetensors")
            torch.manual_seed(0)
            with teraio.init(memory=args.memory, inner=args.inner):
                write(AutoModelForCausalLM.from_config(make_config(args)), weights)
            teraio.reset()
        if args.plain:
            with without_teraio():
                plain = list(losses(make_model(weights, args), args))
        timeline = Path(folder, "timeline.json")
        model = make_model(weights, args, timeline=str(timeline))
        ours, began = [], time.perf_counter()
        for loss in losses(model, args):
            ours.append(loss)
            took_s, began = time.perf_counter() - began, time.perf_counter()
            print(f"step {len(ours) - 1}: loss {loss:.4f}, {took_s:.2f} s")
        steps = frozen_bytes_moved(timeline)
    rows = {"losses_equal_plain_ones": equal(ours, plain)} if args.plain else {}
    for name, trained in {"trained_weights": True, "frozen_weights": False}.items():
        rows[name] = mib(sum(p.nbytes for p in model.parameters() if p.requires_grad is trained))
    table(**rows, **steps)


if __name__ == "__main__":
    main()
