"""Limits set by the operating system. Training keeps its numbers, or an error of teraio names the limit.

tests/long/surroundings.py tests limits of file systems, because that test needs root.
"""

from __future__ import annotations

import json
import resource
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tree
from children import ended

from teraio.runtime.store import link_probe

MIB = 2**20
LIMITS: dict[str, dict[str, int]] = {
    "none": {},
    "64 open files": {"RLIMIT_NOFILE": 64},
    "no locked memory": {"RLIMIT_MEMLOCK": 0},
    "files of 20 MiB": {"RLIMIT_FSIZE": 20 * MIB},
    "files of 1 MiB": {"RLIMIT_FSIZE": MIB},
    "hardly an open file": {"RLIMIT_NOFILE": 5},
}


@cache
def results(folder: Path) -> dict[str, dict[str, Any]]:
    cases = [{"name": name, "store": str(folder), "limits": limits} for name, limits in LIMITS.items()]
    child = str(tree.SUPPORT / "surroundings_child.py")
    command = [sys.executable, child, json.dumps(cases)]
    done = ended(command)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.mark.parametrize("name", ["none", "64 open files", "no locked memory", "files of 20 MiB"])
def test_training_under_system_limit_keeps_numbers(folder: Path, name: str) -> None:
    result = results(folder)[name]
    assert result["same"] and not result["error"]
    assert result["fetches"] > 20, "nothing moved: the test shows nothing"


def test_error_names_exceeded_system_limit(folder: Path) -> None:
    assert "ulimit -n" in results(folder)["hardly an open file"]["error"]
    full = results(folder)["files of 1 MiB"]["error"]
    assert full.partition(":")[0] in {"StoreFullError", "TornStepError"}
    assert "the file size limit is reached" in full and "ulimit -f" in full
    assert list(folder.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("room_mib", [1, 3, 40, 4096])
def test_drive_measurement_respects_file_size_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_mib: int
) -> None:
    written: list[int] = []
    out = link_probe.DriveBench.submit_evict

    def evict(bench: link_probe.DriveBench, place: int, size_bytes: int = 0) -> int:
        written.append((place + 1) * bench.block_bytes)
        return out(bench, place, size_bytes)

    monkeypatch.setattr(link_probe.DriveBench, "submit_evict", evict)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (room_mib * MIB, room_mib * MIB))
    link = link_probe.measure_store_link(tmp_path, seconds=0.02, limit_bytes=64 * MIB).link
    assert 0 < max(written) <= min(room_mib, 64) * MIB
    assert link.evict_bytes_per_s > 10**6 < link.fetch_bytes_per_s
