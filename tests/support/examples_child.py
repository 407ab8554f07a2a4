"""A script that runs examples one after another in one process, each as `python examples/NAME ARGUMENTS`
would.

All examples share one import of torch, because this import takes most of the time of a short example.

    python examples_child.py RUNS.json    a list of {"script", "arguments", "missing"}; prints a list of texts

`missing` names packages that the run cannot import.
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
    """Run an example. Return its output and its log as one text, with a traceback if the example failed."""
    text, log = StringIO(), logging.getLogger("teraio")
    lines = logging.StreamHandler(text)
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    sys.modules.update(dict.fromkeys(run["missing"]))
    with redirect_stdout(text), redirect_stderr(text):
        with mock.patch.object(sys, "argv", [run["script"], *run["arguments"]]):
            try:
                runpy.run_path(run["script"], run_name="__main__")
            except (Exception, SystemExit):  # noqa: BLE001  the other examples must still run
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
