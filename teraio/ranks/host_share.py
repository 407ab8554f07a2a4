"""The share of one rank in its host: the directories of its store, and the rates of its drives.

    directories_of_rank    which directories this rank uses, and how many ranks use them
    Meeting                the ranks of one host begin to measure at the same time, and exchange their rates
    shares_of_drives       the published rates of all ranks -> the share of each rank

A rank that measures a drive alone gets all of the drive's bandwidth, which it has in no later step. So all
ranks of a host measure at once. The published rates then add up to the drive's rate, and each rank of a drive
gets an equal part of the sum.

    rank 0   ready    [measure]   rates ------> read all rates
    rank 1      ready [measure]      rates ---> read all rates

A rank that has waited for LIMIT_S measures alone. Its share is its rate divided by the number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress

from teraio.ranks.rank_store import STORE_ERRORS, RankStore, host_key, local_rank, local_ranks

LIMIT_S = 10.0  # most seconds that a rank waits for the other ranks of its host, for each of two texts
FIELDS = 6  # numbers of a drive: four rates and two latencies
RATES = 4
DRIVES_MAX = 256
NUMBER_END = 2**53

Drives = dict[int, tuple[int, ...]]  # number of a drive (`st_dev`) -> its rates, then its latencies
_NUMBERS = itertools.count()  # every meeting of a process has another key, so no text is used twice


def directories_of_rank(drives: Sequence[int], rank: int, ranks: int) -> tuple[list[int], int]:
    """Return the indices of the directories that a rank of a host uses, and how many ranks use them.

    `drives` has the number of the drive for each directory. Each rank gets the same number of drives for
    itself, or each drive gets the same number of ranks. If neither is possible, all ranks use all drives,
    because a step takes as long as the step of the slowest rank.
    """
    different = list(dict.fromkeys(drives))
    own, sharers = set(different), ranks
    if len(different) % ranks == 0:
        own, sharers = set(different[rank % ranks :: ranks]), 1
    elif ranks % len(different) == 0:
        own, sharers = {different[rank % len(different)]}, ranks // len(different)
    return [index for index, drive in enumerate(drives) if drive in own], sharers


class Meeting:
    """A meeting of the ranks of one host, at which they measure their drives.

    Ranks that have started other numbers of sessions wait for different meetings, until their time limits.
    """

    def __init__(self, store: RankStore, limit_s: float = LIMIT_S) -> None:
        self.store, self.limit_s = store.for_thread(), limit_s
        self.rank, self.ranks = local_rank(), local_ranks()
        self.name = f"drives {next(_NUMBERS)}"

    @staticmethod
    def of_host() -> Meeting | None:
        """Return a new meeting of this host's ranks. Return None if this is the host's only rank, or if the
        ranks have no process group."""
        store = RankStore.of_process() if local_ranks() > 1 else None
        return None if store is None else Meeting(store)

    def begin(self) -> bool:
        """Wait until all ranks of the host are ready to measure. Return False if one has not come in time."""
        with suppress(*STORE_ERRORS):
            self.store.publish(self._key("ready", self.rank), "ready")
            if self.store.wait_for(self._keys("ready"), self.limit_s):
                return True
            # A rank that comes later must not measure in the belief that this rank still waits.
            self.store.remove(self._key("ready", self.rank))
        return False

    def exchange(self, own: Drives) -> list[Drives] | None:
        """Publish this rank's rates. Return the rates of all ranks of the host, or None if they do not come
        in time."""
        with suppress(*STORE_ERRORS):
            self.store.publish(self._key("rates", self.rank), text_of_drives(own))
            if not self.store.wait_for(self._keys("rates"), self.limit_s):
                return None
            found = [drives_from_text(self.store.read(key)) for key in self._keys("rates")]
            return [each for each in found if each is not None] if all(found) else None
        return None

    def _keys(self, what: str) -> list[str]:
        return [self._key(what, rank) for rank in range(self.ranks)]

    def _key(self, what: str, rank: int) -> str:
        return host_key(f"{self.name}/{what}/{rank}")


def shares_of_drives(own: Drives, published: Sequence[Drives]) -> Drives:
    """Return the share of one rank: for each of its drives, the mean of the rates of all ranks that use the
    drive.

    A latency is the least latency of these ranks, because a rank may measure its latency while another rank
    still measures its rates.
    """
    return {
        drive: _mean_numbers([each[drive] for each in published if drive in each] or [numbers])
        for drive, numbers in own.items()
    }


def _mean_numbers(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    columns = list(zip(*rows))
    return (*(max(1, sum(column) // len(rows)) for column in columns[:RATES]), *map(min, columns[RATES:]))


def divided_among(drives: Mapping[int, tuple[int, ...]], ranks: int) -> Drives:
    """Return the rates of drives that a rank has measured alone, divided among the ranks that use them."""
    return {
        drive: (*(max(1, rate // ranks) for rate in numbers[:RATES]), *numbers[RATES:])
        for drive, numbers in drives.items()
    }


def text_of_drives(drives: Drives) -> str:
    """Return a text with one line per drive: its number, its rates and its latencies."""
    return "\n".join(" ".join(map(str, (drive, *numbers))) for drive, numbers in drives.items())


def drives_from_text(text: str | None) -> Drives | None:
    """Return the drives of a text that another rank has published. Return None if the text is invalid."""
    lines = [line.split(" ") for line in (text or "").split("\n")]
    if len(lines) > DRIVES_MAX or any(len(words) != FIELDS + 1 for words in lines):
        return None
    if not all(word.isascii() and word.isdecimal() and len(word) < 20 for words in lines for word in words):
        return None
    drives = {int(words[0]): tuple(map(int, words[1:])) for words in lines}
    numbers = [number for each in drives.values() for number in each]
    return drives if all(0 < number < NUMBER_END for number in numbers) else None
