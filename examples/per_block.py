"""A Llama whose blocks are compiled one by one, as torchtune and torchtitan do.

Identical blocks share one compiled program. teraio plans the whole step, so the plan has separate moves
(evictions and fetches of tensors) for each call of the program.

python examples/per_block.py --memory 120MiB
python examples/per_block.py --memory 120MiB --init       # also makes the model inside the budget
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from side_by_side import arguments, equal, mib, size_bytes, sizes, table, without_teraio

import teraio
from teraio.cli.demo_model import Llama, Shape


def make_model(args: argparse.Namespace) -> Llama:
    torch.manual_seed(0)
    intermediate = args.hidden * 11 // 4
    return Llama(Shape(args.vocabulary, args.hidden, intermediate, args.layers, args.heads, args.heads))


def losses(model: Llama, args: argparse.Namespace) -> Iterator[float]:
    for layer in model.layers:
        layer.compile(backend="teraio", options={"memory": args.memory, "inner": args.inner})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    random = torch.Generator().manual_seed(1)
    for _ in range(args.steps):
        tokens = torch.randint(0, args.vocabulary, (args.batch, args.length + 1), generator=random)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def main() -> None:
    parser = arguments(__doc__ or "", memory="120MiB", steps=8)
    parser.add_argument("--init", action="store_true", help="make the model inside the budget")
    sizes(parser, vocabulary=4096, hidden=256, layers=12, heads=4, batch=4, length=128)
    args = parser.parse_args()
    torch.set_num_threads(1)  # with two threads, sums differ in the last bit from run to run

    with without_teraio():
        plain = list(losses(make_model(args), args))
    torch._dynamo.utils.counters.clear()
    with teraio.init(memory=args.memory, inner=args.inner) if args.init else nullcontext():
        model = make_model(args)
    ours = []
    for loss in losses(model, args):
        ours.append(loss)
        print(f"step {len(ours) - 1}: loss {loss:.4f}")
    table(
        weights_gradients_and_states=mib(4 * size_bytes(model)),
        blocks=str(len(model.layers)),
        programs_compiled_for_them=str(torch._dynamo.utils.counters["stats"]["unique_graphs"]),
        losses_equal_plain_ones=equal(ours, plain),
    )


if __name__ == "__main__":
    main()
