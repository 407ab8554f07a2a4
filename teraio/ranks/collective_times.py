"""The duration of collectives without the wait for other ranks.

A rank measures a collective from its own begin to the end on all ranks. So the duration includes the time
that this rank waits for slower ranks. The least duration of all ranks is nearest to the collective's own
time.

    rank 0   [all_gather.............]     waits for rank 1
    rank 1   [kernel.......][all_gather]   the last rank does not wait
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from teraio.ranks.rank_store import STORE_ERRORS, TEXT_MAX_BYTES, RankStore

NEIGHBOURS = 64  # a rank reads the durations of so many ranks, because each read costs time
NUMBER_DIGITS = 16
PIECE = TEXT_MAX_BYTES // (NUMBER_DIGITS + 1)  # most numbers in one text
NUMBER_END = 2**53


def least_durations(
    store: RankStore, name: str, own_ns: Sequence[int], limit_s: float
) -> tuple[list[int], bool]:
    """Publish the durations of this rank's collectives. Return the least duration of each collective, and
    whether all other ranks have published theirs.

    `name` identifies the step. Ranks with another step have published nothing under it. Ranks that publish
    later than the time limit do not count.
    """
    least, complete = list(own_ns), False
    pieces = [list(own_ns[at : at + PIECE]) for at in range(0, len(own_ns), PIECE)]
    ranks = range(store.rank + 1, store.rank + min(store.ranks, NEIGHBOURS))
    with suppress(*STORE_ERRORS):
        for number, piece in enumerate(pieces):
            store.publish(_key(name, store.rank, number), " ".join(map(str, piece)))
        numbers = range(len(pieces))
        keys = [[_key(name, rank % store.ranks, number) for number in numbers] for rank in ranks]
        complete = store.wait_for([key for each in keys for key in each], limit_s)
        for each in keys:
            durations = _durations_from_texts(list(map(store.read, each)), len(least))
            if durations is not None:
                least = list(map(min, least, durations))
    return least, complete


def remove_durations(store: RankStore, name: str, count: int) -> None:
    """Remove this rank's `count` durations of a step."""
    with suppress(*STORE_ERRORS):
        for number in range(-(-count // PIECE)):
            store.remove(_key(name, store.rank, number))


def _key(name: str, rank: int, number: int) -> str:
    return f"durations {name}/{rank}/{number}"


def _durations_from_texts(texts: Sequence[str | None], count: int) -> list[int] | None:
    """Return the durations that another rank has published, or None if they are invalid."""
    words = " ".join(text or "-" for text in texts).split(" ")
    if len(words) != count or not all(word.isascii() and word.isdecimal() for word in words):
        return None
    durations = [int(word) for word in words if len(word) <= NUMBER_DIGITS]
    return durations if len(durations) == count and max(durations) < NUMBER_END else None
