"""A process that has imported what takes long and compiled a little: scripts run in forks of it.

    nursery.py

reads a request per line of stdin, which children.py writes, and prints a line when its fork has ended. Half
of what a short training costs in a new process is imports, and a compiler's first look at torch. A fork has
both. teraio is not imported here: what it does to torch, and when, is the script's.
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
    """A model that has a compiler load and remember most of what it needs for others."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(self.embedding(tokens)).flatten(0, 1), tokens.flatten())


def warm() -> None:
    """Train a small model, in one thread: a fork of a process with threads has none of them."""
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
    """Run the script of this request as Python would, in this process."""
    for fd, path in enumerate((os.devnull, request["out"], request["err"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, fd)
        os.close(opened)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    faulthandler.enable()
    faulthandler.dump_traceback_later(request["limit_s"], exit=True)
    os.environ.clear()
    os.environ.update(request["env"])
    torch.set_num_threads(int(request["env"].get("OMP_NUM_THREADS", torch.get_num_threads())))
    os.chdir(request["cwd"])
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


def told_of_end(number: int, child: int) -> str:
    """Return the line for a request whose fork has ended: its exit code and its CPU seconds."""
    _, status, used = os.wait4(child, 0)
    return json.dumps((number, os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime))


def main() -> None:
    warm()
    gc.collect()
    gc.freeze()  # pages that a collection would write to are shared with all forks
    poll = select.poll()
    poll.register(STDIN, select.POLLIN)
    running: dict[int, tuple[int, int]] = {}  # by what tells of its end: request and process
    read = b""
    while True:
        ready = [fd for fd, _ in poll.poll()]
        for fd in running.keys() & ready:
            poll.unregister(fd)
            os.close(fd)
            print(told_of_end(*running.pop(fd)), flush=True)
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
