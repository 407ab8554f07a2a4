"""A script without a word about teraio. The test of `teraio run` compares its three runs.

    python launched_script.py STEPS [--memory WORD]     reads a number from standard input, ends with code 7

The script prints one JSON object: what a script can see of the way in which it was started, and its results.
"""

from __future__ import annotations

import importlib.util
import io
import json
import multiprocessing
import os
import signal
import sys
from typing import Any

assert importlib.util.find_spec("torch")  # libraries look for torch before they import it

import torch  # noqa: E402
from launched_train import digest, net_and_adamw, train  # noqa: E402


class Kept:
    """A class of `__main__`. Its objects can be loaded again only if `__main__` is this script."""

    def __init__(self, value: float) -> None:
        self.value = value


def seen_in_child(queue: Any) -> None:
    queue.put([os.path.basename(sys.argv[0]), "torch" in sys.modules])


def start_child() -> list[Any]:
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    child = spawn.Process(target=seen_in_child, args=(queue,))
    child.start()
    found = queue.get(timeout=300)
    child.join()
    return [*found, child.exitcode]


def main() -> None:
    net, optimizer = net_and_adamw()
    losses = train(net, optimizer, int(sys.argv[1]))
    file = io.BytesIO()
    torch.save(Kept(losses[-1]), file)
    file.seek(0)
    print(
        json.dumps(
            {
                "argv": sys.argv[1:],
                "path": [entry for entry in sys.path if "bootstrap" in entry],
                "main": sys.modules["__main__"].__dict__["Kept"].__qualname__,
                "kept": torch.load(file, weights_only=False).value == losses[-1],
                "stdin": sys.stdin.read(),
                "pipe": str(signal.getsignal(signal.SIGPIPE)),
                "child": start_child(),
                "digest": digest(losses, net),
                "keys": list(net.state_dict()),
            }
        )
    )
    sys.exit(7)


if __name__ == "__main__":
    main()
