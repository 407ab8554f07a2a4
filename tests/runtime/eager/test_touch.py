"""Operations of user code on an evicted tensor. Each operation works as on a resident tensor, or raises a
clear error.

No operation crashes, reads wrong bytes or loses a write.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache

import pytest
import tree
from children import forked

CHILD = tree.SUPPORT / "touch_child.py"
DEATHS = 5  # after this number of crashes, the other cases of the run count as failed

Case = tuple[str, str]  # kind of tensor and name of the operation


def run(first: int, bug: str = "") -> tuple[dict[Case, str], int]:
    """Run the cases from number `first` on in a child process.

    Return a pair: the fault of each case, and the number of the next case. If all cases have run, the number
    is 0.
    """
    done = forked(CHILD, str(first), bug)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found = {(kind, name): wrong for (_, kind, name), wrong in zip(lines[::2], lines[1::2])}
    assert done.returncode <= 0, done.stderr[-3000:]
    if done.returncode == 0:
        return found, 0
    number, kind, name = lines[-1]
    found[kind, name] = f"the process died of it ({done.returncode}): {done.stderr[-1000:]}"
    return found, number + 1


@cache
def touched() -> dict[Case, str]:
    found, following = run(0)
    for _ in range(DEATHS):
        if following:
            more, following = run(following)
            found.update(more)
    if following:
        found["all", "the rest"] = f"given up after {DEATHS} deaths"
    return found


def test_touch_of_an_evicted_tensor_gives_true_bytes_and_loses_no_write() -> None:
    wrong = [f"{kind}, {name}: {what}" for (kind, name), what in touched().items() if what]
    assert not wrong, "\n".join(wrong)


def test_every_kind_is_touched_in_many_ways() -> None:
    kinds = Counter(kind for kind, _ in touched())
    assert set(kinds) == {"gradient", "state", "weight", "frozen", "buffer", "index"}
    assert min(count for kind, count in kinds.items() if kind != "index") > 190


@pytest.mark.parametrize(("bug", "first"), [("nothing is observed", 1000), ("no write is noted", 970)])
def test_a_planted_bug_is_found(bug: str, first: int) -> None:
    """Run cases with the bug in a child process. A crash of the process counts as a failed case.

    `first` is the number of a case shortly before a case that must fail.
    """
    found, following = run(first, bug)
    assert following or any(found.values())
