"""Tests of the lanes in which tests run. An exclusive test runs alone, and no test waits forever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from lanes import Lanes


def test_exclusive_test_runs_alone_despite_a_stream_of_others(tmp_path: Path) -> None:
    running: list[str] = []
    seen: list[tuple[str, int]] = []
    stop = threading.Event()

    def work(name: str, enter: Callable[[], AbstractContextManager[None]], times: int) -> None:
        for _ in range(times):
            with enter():
                running.append(name)
                time.sleep(0.001)
                seen.append((name, len(running)))
                running.remove(name)
            if stop.is_set():
                return

    lanes = Lanes(tmp_path / "lanes")
    others = [threading.Thread(target=work, args=(f"other{n}", lanes.beside_others, 10**6)) for n in range(3)]
    for other in others:
        other.start()
    single = threading.Thread(target=work, args=("alone", lanes.alone, 20))
    single.start()
    single.join(60)
    stop.set()
    for other in others:
        other.join(60)
    assert not single.is_alive()
    assert {together for name, together in seen if name == "alone"} == {1}
    assert max(together for name, together in seen if name != "alone") > 1
