"""The examples run as they are, in sizes for a test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = "--vocabulary 256 --hidden 128 --layers 6 --heads 4 --inner eager"
RUNS = {
    "larger_than_memory.py": "--memory 8MiB --tokens 16 --steps 2",
    "streaming_inference.py": "--memory 6MiB --tokens 2",
}


@pytest.mark.parametrize("name", RUNS)
def test_an_example_keeps_more_weights_than_it_has_memory_for(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / name), *TINY.split(), *RUNS[name].split()]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert ran.returncode == 0, ran.stderr[-3000:]
    weights = float(re.findall(r"weights ([0-9.]+) MiB", ran.stdout)[0])
    peak = float(re.findall(r"peak ([0-9.]+) MiB", ran.stdout)[0])
    assert peak < weights, ran.stdout
    assert "overrun" not in ran.stderr
