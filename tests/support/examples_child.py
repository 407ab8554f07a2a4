"""Runs examples one after the other, each as `python examples/NAME ARGUMENTS` does, in one process: most of
what a short one takes is the import of torch.

    python examples_child.py RUNS.json    a list of {"script", "arguments", "missing"}; prints a list of texts

`missing` are packages that cannot be imported in that run.
"""

from __future__ import annotations

import json
import logging
import runpy
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import teraio


def text_of(run: dict[str, Any]) -> str:
    """What it prints, its log, and how it ended if not well."""
    text, log = StringIO(), logging.getLogger("teraio")
    lines = logging.StreamHandler(text)
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    sys.modules.update(dict.fromkeys(run["missing"]))
    with redirect_stdout(text), redirect_stderr(text):
        with mock.patch.object(sys, "argv", [run["script"], *run["arguments"]]):
            try:
                runpy.run_path(run["script"], run_name="__main__")
            except (Exception, SystemExit):  # noqa: BLE001  the others run all the same
                traceback.print_exc()
    for name in run["missing"]:
        del sys.modules[name]
    log.removeHandler(lines)
    teraio.reset()
    torch._dynamo.reset()
    return text.getvalue()


def main() -> None:
    runs = json.loads(Path(sys.argv[1]).read_text())
    sys.path.insert(0, str(Path(runs[0]["script"]).parent))
    print(json.dumps([text_of(run) for run in runs]))


if __name__ == "__main__":
    main()
