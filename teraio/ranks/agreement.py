"""The agreement of all ranks on everything that changes the order of their collectives.

A collective waits for all ranks. If one rank begins another collective at the same point, all ranks wait
until a time limit, or exchange bytes of different tensors. So ranks compare texts before they run a program:

    check_options        at the start of a session: versions, and options that change programs
    check_collectives    when a program is loaded: its collectives, in order

The first rank publishes its text, and each later rank compares. No rank waits for another rank. So ranks may
compile different numbers of graphs, at different times. If the key-value store fails, nothing is compared.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress

from teraio.errors import UnsupportedError
from teraio.ranks.rank_store import STORE_ERRORS, TEXT_MAX_BYTES, RankStore
from teraio.units import printable_line

SHOWN = 4  # most differences in a message
RANK = "rank "  # begins the first line of each text, which names the rank
_SESSIONS = itertools.count()  # the texts of a session are compared only with texts of the same session


class Agreement:
    """The texts of one session, and the first texts of other ranks for the same keys."""

    def __init__(self, store: RankStore, options: Mapping[str, str]) -> None:
        self.store = store
        self.options = [printable_line(f"{name}={value}") for name, value in options.items()]
        digest = hashlib.sha256("\n".join(self.options).encode()).hexdigest()[:16]
        self.session = next(_SESSIONS)
        # Ranks with other options may have another order of collectives, and get another error before.
        self.programs = f"programs {self.session} {digest}"
        self.checked: set[str] = set()

    def check_options(self) -> None:
        """Raise UnsupportedError if another rank has other versions or options."""
        first = self._first_lines(f"options {self.session}", self.options)
        if first is None:
            return
        rank, lines = first
        here = [line for line in self.options if line not in lines]
        there = [line for line in lines if line not in self.options]
        if here or there:
            raise UnsupportedError(
                f"rank {self.store.rank} uses {_shown(here)}, {rank} uses {_shown(there)}: the ranks would "
                f"begin different collectives and wait for each other. Give all ranks the same versions and "
                f"the same values of these options"
            )

    def check_collectives(self, kind: str, graph: str, collectives: Sequence[str]) -> None:
        """Raise UnsupportedError if another rank has compiled the same graph to a program with other
        collectives. Compare only the first program of a graph, because a rank may change its settings later.
        """
        key = f"{kind} {graph}"
        if not graph or key in self.checked:
            return
        self.checked.add(key)
        own = _fitting_lines(collectives)
        first = self._first_lines(f"{self.programs} {key}", own)
        if first is None or first[1] == own:
            return
        rank, lines = first
        at = next((at for at, (a, b) in enumerate(zip(own, lines)) if a != b), min(len(own), len(lines)))
        raise UnsupportedError(
            f"rank {self.store.rank} and {rank} have compiled the same graph to {kind} programs with "
            f"different collectives: collective {at} is {_shown(own[at : at + 1])} on rank "
            f"{self.store.rank}, and {_shown(lines[at : at + 1])} on {rank}. Give all ranks the same "
            f"versions and the same settings of Inductor"
        )

    def _first_lines(self, key: str, own: Sequence[str]) -> tuple[str, list[str]] | None:
        """Publish this rank's lines, unless another rank has published lines under this key. Return the name
        of the first rank, and its lines. Return None if the store fails, or if the lines are invalid."""
        with suppress(*STORE_ERRORS):
            text = self.store.publish_first(key, "\n".join((f"{RANK}{self.store.rank}", *own)))
            rank, *lines = text.split("\n")
            if rank.startswith(RANK) and rank.removeprefix(RANK).isdecimal() and len(rank) < 20:
                return rank, lines
        return None


def _shown(lines: Sequence[str]) -> str:
    more = ", ..." if len(lines) > SHOWN else ""
    return (", ".join(printable_line(line, 100) for line in lines[:SHOWN]) or "none of these") + more


def _fitting_lines(collectives: Sequence[str]) -> list[str]:
    """Return a line per collective. If the text would be too long, also for the store, return one hash."""
    lines = [printable_line(line) for line in collectives]
    if sum(len(line) + 1 for line in lines) > TEXT_MAX_BYTES // 2:
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
        return [f"one of {len(lines)} collectives with hash {digest}"]
    return lines
