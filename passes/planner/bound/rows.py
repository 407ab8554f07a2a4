"""A linear program as sparse rows of integers. This module solves nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

NS_PER_S = 1_000_000_000
Terms = list[tuple[int, int]]  # (unknown, factor)


@dataclass(slots=True)
class Rows:
    """A linear program: minimize the sum of the stalls, subject to low <= row <= high. None means no limit.

    The first `stalls` unknowns are stalls (waits of compute for transfers) in ns, at least 0. All other
    unknowns are fractions from 0 to 1.
    """

    stalls: int
    unknowns: int
    low: list[int | None] = field(default_factory=list)
    high: list[int | None] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    factor: list[int] = field(default_factory=list)

    def add_unknown(self) -> int:
        self.unknowns += 1
        return self.unknowns - 1

    def add_row(self, low: int | None, high: int | None, terms: Terms) -> None:
        self.row += [len(self.low)] * len(terms)
        self.low.append(low)
        self.high.append(high)
        self.column += [column for column, _ in terms]
        self.factor += [factor for _, factor in terms]
