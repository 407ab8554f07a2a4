"""Processes that tests start. One that hangs fails its test, before pytest would end all of them for it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 840  # pyproject.toml has faulthandler_timeout: 900


def ended(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    given: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Of a process that ran to its end."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=env,
        cwd=cwd,
        input=given,
        timeout=LIMIT_S,
    )


def one_by_one(items: Sequence[Any], run: Callable[[Sequence[Any]], Sequence[Any]]) -> list[Any]:
    """Collects a result for each item, from items that share a process. None stands for an item that ended
    its process; the items after it go on in another one."""
    found: list[Any] = []
    while len(found) < len(items):
        found += run(items[len(found) :])
        if len(found) < len(items):
            found.append(None)
    return found
