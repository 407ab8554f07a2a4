"""A script that runs one check in this process, or lists all checks.

prove.py starts this script in the environment of the stand-in, which replaces the GPU's driver. A check is a
function `check_*` in a module `check_*.py`. A check that fails raises AssertionError. Otherwise it returns
None, or figures for its row in the output. A module may define:

SAMPLE       names of the checks that run in the sample
CASES        more checks, by name
VARIABLES    environment variables of the checks' processes
ALONE        True if the module's checks measure durations and must run alone
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

Check = Callable[[], Mapping[str, Any] | None]


def modules() -> list[str]:
    return sorted(path.stem for path in Path(__file__).parent.glob("check_*.py"))


def checks(module: ModuleType) -> dict[str, Check]:
    own = {
        name: function
        for name, function in vars(module).items()
        if name.startswith("check_")
        and inspect.isfunction(function)
        and function.__module__ == module.__name__
    }
    return {**own, **getattr(module, "CASES", {})}


def main() -> int:
    if sys.argv[1:] == ["--list"]:
        found = {}
        for name in modules():
            module = importlib.import_module(name)
            sample = getattr(module, "SAMPLE", None)
            alone, variables = getattr(module, "ALONE", False), getattr(module, "VARIABLES", {})
            for check in checks(module):
                in_sample = sample is None or check in sample
                found[f"{name}.{check}"] = {"sample": in_sample, "alone": alone, "set": variables}
        print(json.dumps(found))
        return 0
    importlib.import_module("standin")
    module = importlib.import_module(sys.argv[1])
    print(json.dumps(checks(module)[sys.argv[2]]() or {}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
