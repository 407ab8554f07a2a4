"""Evicted tensors are read from C++, other threads, finalizers and forks: the same numbers, or an error that
says what to do. No crash, no hang, no garbage."""

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
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case found. The extension is built once."""
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


def test_an_extension_reads_by_operator_and_by_address_whoever_holds_the_gil(told: dict[str, Any]) -> None:
    ways = told["extension"]
    assert len(ways) == 9
    assert all(ways.values()), ways


def test_an_operator_of_the_users_finds_its_argument(told: dict[str, Any]) -> None:
    assert told["custom_operator"]["same"]


def test_a_write_through_an_address_is_not_lost(told: dict[str, Any]) -> None:
    assert told["pointer_writes"] == {"told": 0, "same": True}


def test_who_holds_the_gil_and_waits_for_a_reader_gets_an_error_and_no_deadlock(told: dict[str, Any]) -> None:
    assert told["waits_for_us"] == {"error": True, "after": True}


def test_threads_and_finalizers_read_while_programs_run(told: dict[str, Any]) -> None:
    assert told["threads_and_finalizers"] == {"wrong": [], "finalized": True}


def test_modes_of_the_user_do_not_see_a_fetch_and_are_as_before(told: dict[str, Any]) -> None:
    assert told["modes_are_restored"] == {
        "names": ["mul.Tensor"],
        "kept": [True, True, False],
        "inference": True,
    }


def test_all_arguments_of_an_operator_are_there_at_once_and_an_overrun_is_said(told: dict[str, Any]) -> None:
    assert told["arguments_stay"] == {"same": True, "overrun": True}


def test_a_read_that_fails_names_the_tensor_and_a_later_one_succeeds(told: dict[str, Any]) -> None:
    assert told["store_fails"] == {"told": [True, True], "after": True}


def test_a_fork_is_told_that_it_cannot_fetch(told: dict[str, Any]) -> None:
    assert told["child_of_a_fork"] == {"told": True, "code": 0}


def test_the_profiler_runs_beside_it(told: dict[str, Any]) -> None:
    assert told["profiler_beside"] == {"same": True, "seen": True}


def test_scripts_functorch_and_local_tensors_read_what_is_evicted(told: dict[str, Any]) -> None:
    ways = told["where_no_class_is_asked"]
    assert len(ways) == 7
    assert all(ways.values()), ways


def test_a_model_that_dynamo_gives_up_trains_to_the_same_bits(told: dict[str, Any]) -> None:
    assert told["recompile_limit"] == {"same": True, "moved": True}


def test_threads_that_take_one_address_at_once_all_get_it(told: dict[str, Any]) -> None:
    assert told["pointers_at_once"] == {"wrong": 0}


def test_a_process_ends_while_threads_read(told: dict[str, Any]) -> None:
    assert told["ends_with_threads"] == {"ended": True}
