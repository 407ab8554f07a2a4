"""Reads of evicted tensors from C++, other threads, finalizers and forked processes.

Each read returns the correct numbers, or raises an error that suggests a remedy. No read crashes or hangs.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import tree
from children import forked
from observer_child import CASES

CHILD = tree.SUPPORT / "observer_child.py"


ALONE = ("threads_and_finalizers", "ends_with_threads")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all cases in child processes, and return their results. The processes share one build of the C++
    extension."""
    folder = tmp_path_factory.mktemp("reader")
    folder.chmod(0o700)
    together = [name for name in CASES if name not in ALONE]
    found: dict[str, Any] = {}
    for names in (together, *([name] for name in ALONE)):
        done = forked(CHILD, *names, env={**os.environ, "READER_FOLDER": str(folder)})
        assert done.returncode == 0, done.stderr[-3000:]
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                found.update(json.loads(line))
    return found


def test_extension_reads_evicted_tensor_with_and_without_the_gil(results: dict[str, Any]) -> None:
    ways = results["extension"]
    assert len(ways) == 9
    assert all(ways.values()), ways


def test_custom_operator_reads_its_fetched_argument(results: dict[str, Any]) -> None:
    assert results["custom_operator"]["same"]


def test_a_write_through_an_address_is_not_lost(results: dict[str, Any]) -> None:
    assert results["pointer_writes"] == {"told": 0, "same": True}


def test_gil_holder_that_waits_for_a_reader_gets_error_and_no_deadlock(results: dict[str, Any]) -> None:
    assert results["waits_for_us"] == {"error": True, "after": True}


def test_threads_and_finalizers_read_while_programs_run(results: dict[str, Any]) -> None:
    assert results["threads_and_finalizers"] == {"wrong": [], "finalized": True}


def test_user_modes_do_not_see_a_fetch_and_are_restored(results: dict[str, Any]) -> None:
    assert results["modes_are_restored"] == {
        "names": ["mul.Tensor"],
        "kept": [True, True, False],
        "inference": True,
    }


def test_all_operator_arguments_are_resident_at_once_and_overrun_is_logged(results: dict[str, Any]) -> None:
    assert results["arguments_are_kept"] == {"same": True, "overrun": True}


def test_a_read_that_fails_names_the_tensor_and_a_later_one_succeeds(results: dict[str, Any]) -> None:
    assert results["store_fails"] == {"told": [True, True], "after": True}


def test_read_of_evicted_tensor_in_fork_raises(results: dict[str, Any]) -> None:
    assert results["child_of_a_fork"] == {"told": True, "code": 0}


def test_torch_profiler_works_with_the_observer(results: dict[str, Any]) -> None:
    assert results["profiler_beside"] == {"same": True, "seen": True}


def test_scripts_functorch_and_local_tensors_read_evicted_tensors(results: dict[str, Any]) -> None:
    ways = results["where_no_class_is_asked"]
    assert len(ways) == 7
    assert all(ways.values()), ways


def test_model_past_recompile_limit_trains_to_the_same_bits(results: dict[str, Any]) -> None:
    assert results["recompile_limit"] == {"same": True, "moved": True}


def test_threads_that_take_one_address_at_once_read_correct_bytes(results: dict[str, Any]) -> None:
    assert results["pointers_at_once"] == {"wrong": 0}


def test_process_exits_while_threads_read(results: dict[str, Any]) -> None:
    assert results["ends_with_threads"] == {"ended": True}
