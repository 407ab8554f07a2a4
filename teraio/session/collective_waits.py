"""Durations of a step's collectives without the wait for other ranks.

In: a measured profile. Out: the same profile, in which each collective has the least duration of all ranks.

Ranks can have different tensors, because shards may be uneven. So a name of the step's collectives and the
step's number identify a step on all ranks, and not the profile's fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from teraio.formats.profile import Kernel, Profile
from teraio.ranks import failures
from teraio.ranks.collective_names import is_collective
from teraio.ranks.collective_times import least_durations, remove_durations
from teraio.ranks.rank_store import RankStore
from teraio.runtime.engine.engine import Engine

LIMIT_S = 2.0  # most seconds that this rank waits for the durations of the others
# The same, if a rank did not answer the last time. It may not measure the same steps as this rank.
LATER_LIMIT_S = 0.1


class CollectiveWaits:
    """The exchange of measured durations with the other ranks of the training."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.limits_s: dict[str, float] = {}  # by name of the collectives: the time limit of the next wait
        self.published: tuple[str, int] = "", 0  # name of the last published step, and its collectives

    def with_least_durations(self, profile: Profile) -> Profile:
        """Return the profile of the step that has just ended, with the least durations of all ranks for its
        collectives.

        If the store's server has ended, return the profile unchanged.
        """
        ticks = [tick for tick, kernel in enumerate(profile.kernels) if is_collective(kernel.name)]
        store = RankStore.of_process() if ticks and not failures.has_store_ended() else None
        if store is None:
            return profile
        kernels = list(profile.kernels)
        own_ns = [kernels[tick].duration_ns for tick in ticks]
        for tick, duration_ns in zip(ticks, self._least_ns(store, [kernels[tick] for tick in ticks])):
            kernels[tick] = replace(kernels[tick], duration_ns=duration_ns)
        less_ns = sum(own_ns) - sum(kernels[tick].duration_ns for tick in ticks)
        return replace(profile, kernels=tuple(kernels), step_ns=max(0, profile.step_ns - less_ns))

    def waited_for_ranks_ns(self, profile: Profile) -> int:
        """Return how long the collectives of the step that has just ended waited for other ranks."""
        return profile.compute_ns - self.with_least_durations(profile).compute_ns

    def _least_ns(self, store: RankStore, collectives: Sequence[Kernel]) -> list[int]:
        """Return the least durations of these kernels on all ranks."""
        text = "\n".join(f"{kernel.call} {kernel.name}" for kernel in collectives)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        own_ns = [kernel.duration_ns for kernel in collectives]
        step = f"{name} {self.engine.meter.begun}"
        own_store, limit_s = store.for_thread(), self.limits_s.get(name, LIMIT_S)
        if self.published[0] != step:
            remove_durations(own_store, *self.published)
        least_ns, complete = least_durations(own_store, step, own_ns, limit_s)
        self.published = step, len(own_ns)
        self.limits_s[name] = LIMIT_S if complete else LATER_LIMIT_S
        return least_ns
