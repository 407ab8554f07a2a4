"""Failures of a rank: the other ranks end and name the failed rank, unless it goes on."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import tree
from children import forked_rows

from teraio.errors import BudgetError, RankError, TeraioError
from teraio.ranks import collectives, failures
from teraio.ranks.connections import is_any_closed, make_with_connections
from teraio.ranks.failures import RankFailures
from teraio.ranks.processes import RankProcess
from teraio.ranks.rank_store import RankStore

CASES = ("budget", "torn", "killed")
LIMIT_S = 10.0  # the time in which all ranks end after the failure of one
CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    rows = forked_rows(tree.SUPPORT / "failing_ranks.py", str(folder), *CASES)
    return {row["case"]: row for row in rows}


@pytest.mark.parametrize(("case", "error"), [("budget", "BudgetError"), ("torn", "TornStepError")])
def test_rank_that_waits_in_a_collective_ends_with_the_error_of_the_failed_rank(
    ran: dict[str, dict[str, Any]], case: str, error: str
) -> None:
    row = ran[case]
    assert row["error"].startswith(error)
    last = row["output"].strip().splitlines()[-1]
    assert last.startswith(f"teraio: RankError: rank 1: {row['error']}")
    assert row["code"] == 1
    assert row["seconds"] < LIMIT_S


def test_failed_rank_that_goes_on_ends_no_other_rank(ran: dict[str, dict[str, Any]]) -> None:
    """In the case `torn`, rank 1 has caught a BudgetError before."""
    output = ran["torn"]["output"]
    assert "rank 1: BudgetError" in output, "rank 0 has not seen the failure: the test shows nothing"
    assert "trained step 1" in output


def test_error_of_a_collective_names_the_killed_rank(ran: dict[str, dict[str, Any]]) -> None:
    row = ran["killed"]
    assert row["code"] == 3
    last = row["output"].strip().splitlines()[-1]
    assert "RankError: the process of rank 1 has ended. The error was: " in last
    assert "gloo" in last
    assert row["seconds"] < LIMIT_S


@pytest.mark.parametrize("case", CASES)
def test_ended_ranks_leave_no_bytes_in_named_files(ran: dict[str, dict[str, Any]], case: str) -> None:
    assert ran[case]["left"] == 0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(failures.time, "sleep", made.sleep)
    return made


@pytest.fixture
def both(clock: Clock) -> tuple[RankFailures, RankFailures]:
    """Return the failures as rank 0 sees them, and as rank 1 sees them."""
    store = dist.HashStore()
    views = [RankStore(store, rank, 2) for rank in (0, 1)]
    zero, one = (RankFailures(view, view, clock) for view in views)
    return zero, one


def test_failure_stands_after_the_grace_until_it_is_cancelled(
    both: tuple[RankFailures, RankFailures], clock: Clock
) -> None:
    zero, one = both
    one.publish(BudgetError("too\tsmall"))
    zero.look(zero.watched)
    assert str(zero.first_seen()) == "rank 1: BudgetError: too?small"
    assert zero.standing() is None
    clock.sleep(failures.GRACE_S)
    assert zero.standing() == zero.first_seen()
    one.cancel()
    zero.look(zero.watched)
    assert zero.first_seen() is None
    assert zero.standing() is None


def test_second_failure_has_a_grace_of_its_own(both: tuple[RankFailures, RankFailures], clock: Clock) -> None:
    zero, one = both
    for _ in range(2):
        one.publish(BudgetError("too small"))
        zero.look(zero.watched)
        assert zero.standing() is None
        clock.sleep(failures.GRACE_S)
        one.cancel()


def test_rank_neither_sees_its_own_failure_nor_publishes_a_rank_error(
    both: tuple[RankFailures, RankFailures],
) -> None:
    zero, one = both
    one.publish(BudgetError("too small"))
    one.look(one.watched)
    assert one.first_seen() is None
    zero.publish(RankError("rank 1: BudgetError: too small"))
    one.look(one.watched)
    assert one.first_seen() is None


def test_new_engine_cancels_the_failure_of_the_earlier_one(both: tuple[RankFailures, RankFailures]) -> None:
    zero, one = both
    one.publish(BudgetError("too small"))
    RankFailures(one.own, one.watched).begin()
    zero.look(zero.watched)
    assert zero.first_seen() is None


def test_error_of_a_collective_waits_for_the_failure_that_explains_it(
    both: tuple[RankFailures, RankFailures], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one = both
    assert zero.explain(ValueError(CLOSED)) is None
    assert zero.explain(TeraioError(CLOSED)) is None
    assert clock.now == 0
    assert zero.explain(RuntimeError(CLOSED)) is None
    assert failures.EXPLAIN_S <= clock.now < failures.EXPLAIN_S + 1

    def publish_late(seconds: float) -> None:
        one.publish(BudgetError("too small"))

    monkeypatch.setattr(failures.time, "sleep", publish_late)
    explained = zero.explain(RuntimeError(CLOSED))
    assert isinstance(explained, RankError)
    assert str(explained) == "rank 1: BudgetError: too small"


def test_store_that_does_not_answer_raises_nothing(clock: Clock) -> None:
    class Ended:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection reset by peer")

    view = RankStore(Ended(), 0, 2)
    alone = RankFailures(view, view, clock)
    alone.publish(BudgetError("too small"))
    alone.cancel()
    assert alone.explain(RuntimeError(CLOSED)) is None


def test_process_has_ended_when_it_is_a_zombie_or_its_number_has_another_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ours = RankProcess.of_this_process()
    assert ours is not None
    assert RankProcess.parse(str(ours)) == ours
    assert not ours.has_ended()
    assert replace(ours, started="1").has_ended()
    assert not replace(ours, started="1", space="pid:[1]").has_ended()
    other = replace(ours, pid=child.pid, started=_start_of(child.pid))
    assert not other.has_ended()
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert other.has_ended()
    child.communicate()
    assert other.has_ended()


def _start_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


@pytest.mark.parametrize("text", [None, "", "1 2", "x 2 pid:[1]"])
def test_other_texts_are_no_process(text: str | None) -> None:
    assert RankProcess.parse(text) is None


def test_rank_takes_part_only_with_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[bool] = []
    monkeypatch.setattr(failures._PROCESS, "take_part", lambda: began.append(True))
    failures.take_part_if_collective(["enter", "mm", "exit"])
    assert not began
    failures.take_part_if_collective(["torch.ops._c10d_functional.wait_tensor.default"])
    assert began


def test_all_waits_end_within_the_limit() -> None:
    looks = 3 * failures.LOOK_EVERY_S  # for the failure, its grace, and the aborted collective
    assert looks + failures.GRACE_S + failures.ABORT_S < LIMIT_S
    assert collectives.places_in_collectives() == set()


def test_closed_connection_is_noticed_without_a_read() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    ours, connections = make_with_connections(lambda: socket.create_connection(server.getsockname()))
    theirs, _ = server.accept()
    assert connections == [ours.fileno()]
    assert not is_any_closed(connections)
    theirs.send(b"unread")
    assert not is_any_closed(connections)
    theirs.close()
    assert is_any_closed(connections)
    ours.close()
    server.close()
    assert not is_any_closed([])


def test_program_begins_only_if_no_failure_stands(
    both: tuple[RankFailures, RankFailures], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one = both
    monkeypatch.setattr(failures._PROCESS, "failures", zero)
    one.publish(BudgetError("too small"))
    zero.look(zero.watched)
    failures.raise_if_rank_failed()
    clock.sleep(failures.GRACE_S)
    with pytest.raises(RankError, match="rank 1: BudgetError: too small"):
        failures.raise_if_rank_failed()
    one.cancel()
    zero.look(zero.watched)
    failures.raise_if_rank_failed()


def test_only_a_lasting_wait_ends_the_process(
    both: tuple[RankFailures, RankFailures], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one = both
    ended: list[str] = []
    places: list[set[Any]] = [set()]
    monkeypatch.setattr(failures, "end_process", lambda failure: ended.append(str(failure)))
    monkeypatch.setattr(collectives, "places_in_collectives", lambda: places[0])
    one.publish(BudgetError("too small"))
    zero.look(zero.watched)
    clock.sleep(failures.GRACE_S)
    for place in (set(), {1}, {2}):  # the thread is in no collective, then in one, then in another
        places[0] = place
        zero.end_waits()
        assert not ended
    zero.end_waits()
    assert ended == ["rank 1: BudgetError: too small"]


def test_collectives_of_nccl_are_aborted_before_the_process_ends(
    both: tuple[RankFailures, RankFailures], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one = both
    calls: list[str] = []
    monkeypatch.setattr(failures, "end_process", lambda failure: calls.append("end"))
    monkeypatch.setattr(collectives, "places_in_collectives", lambda: {1})
    monkeypatch.setattr(collectives, "can_abort", lambda: True)
    monkeypatch.setattr(collectives, "abort_groups", lambda: calls.append("abort"))
    one.publish(BudgetError("too small"))
    zero.look(zero.watched)
    clock.sleep(failures.GRACE_S)
    for _ in range(3):
        zero.end_waits()
    assert calls == ["abort"]
    one.cancel()
    zero.look(zero.watched)
    assert zero.standing() is not None, "aborted groups never work again"
    clock.sleep(failures.ABORT_S)
    zero.end_waits()
    assert calls == ["abort", "end"]


def test_single_process_has_no_failures() -> None:
    assert RankStore.of_process() is None
    failures.take_part()
    failures.note_collectives()
    failures.raise_if_rank_failed()
    with pytest.raises(torch.OutOfMemoryError), failures.reporting():
        raise torch.OutOfMemoryError


class Argument:
    pass


def test_looking_for_waits_keeps_no_argument_of_a_call_alive() -> None:
    argument, began, ends = Argument(), threading.Event(), threading.Event()

    def call(given: list[Argument]) -> None:
        held = given.pop()  # noqa: F841  only this call holds the argument
        began.set()
        ends.wait()

    given, seen = [argument], weakref.ref(argument)
    del argument
    thread = threading.Thread(target=call, args=(given,))
    gc.disable()  # the garbage collector would free frames that hold each other
    try:
        thread.start()
        began.wait()
        collectives.places_in_collectives()
        collectives.place_of_main_thread()
        ends.set()
        thread.join()
        assert seen() is None
    finally:
        gc.enable()
