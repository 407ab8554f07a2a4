"""A process that has imported slow modules and compiled a small model. Scripts run in forks of this process.

    nursery.py

The process reads a request from each line of stdin, and prints a line when the request's fork has ended.
children.py writes the requests. In a new process, imports and the compiler's first start take half of the
time of a short training. A fork saves this time. The process does not import teraio, because this import
changes torch, and each script must decide when to import teraio.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import runpy
import select
import signal
import sys
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

STDIN = 0


class Small(nn.Module):
    """A model whose compilation makes the compiler load and cache most of what other models need."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(self.embedding(tokens)).flatten(0, 1), tokens.flatten())


def warm() -> None:
    """Train a small model with one thread, because a fork would not have the other threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.randint(0, 8, (2, 5), generator=torch.Generator())).backward()
    optimizer.step()
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(torch.default_generator.initial_seed())
    torch.set_num_threads(threads)


def become(request: dict[str, Any]) -> None:
    """Run the request's script in this process, as the Python interpreter would."""
    for fd, path in enumerate((os.devnull, request["out"], request["err"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, fd)
        os.close(opened)
    # A shell's background jobs ignore SIGINT, and forks inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    faulthandler.dump_traceback_later(request["limit_s"], exit=True)
    os.environ.clear()
    os.environ.update(request["env"])
    torch.set_num_threads(int(request["env"].get("OMP_NUM_THREADS", torch.get_num_threads())))
    os.chdir(request["cwd"])
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


def line_of_end(number: int, child: int) -> str:
    """Return the line for a request whose fork has ended, with the fork's exit code and CPU seconds."""
    _, status, used = os.wait4(child, 0)
    return json.dumps((number, os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime))


def main() -> None:
    warm()
    gc.collect()
    gc.freeze()  # otherwise a collection in a fork would copy shared pages
    poll = select.poll()
    poll.register(STDIN, select.POLLIN)
    # (number of the request, process id) by the descriptor that signals the end
    running: dict[int, tuple[int, int]] = {}
    read = b""
    while True:
        ready = [fd for fd, _ in poll.poll()]
        for fd in running.keys() & ready:
            poll.unregister(fd)
            os.close(fd)
            print(line_of_end(*running.pop(fd)), flush=True)
        if STDIN not in ready:
            continue
        if not (got := os.read(STDIN, 2**16)):
            return
        *lines, read = (read + got).split(b"\n")
        for request in map(json.loads, lines):
            child = os.fork()
            if not child:
                become(request)
                return
            ends = os.pidfd_open(child)
            poll.register(ends, select.POLLIN)
            running[ends] = request["number"], child


if __name__ == "__main__":
    main()
