"""Counts of tensors that were fetched for operators outside of compiled programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from teraio.runtime.eager.user_code import UserCode
from teraio.runtime.ledger.record import Record, State

FETCH = UserCode.make_resident_for_user


@contextmanager
def fetched() -> Iterator[Counter[tuple[str, str]]]:
    """Yield a counter of the tensors that are fetched for user code while the block runs. The counter's keys
    are pairs (operator, kind of tensor).
    """
    found: Counter[tuple[str, str]] = Counter()

    def fetch(user: UserCode, records: Sequence[Record], live_bytes: int, place: str) -> None:
        found.update((place, record.kind) for record in records if record.state is State.EVICTED)
        FETCH(user, records, live_bytes, place)

    with patch.object(UserCode, "make_resident_for_user", fetch):
        yield found
