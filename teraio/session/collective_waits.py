"""Durations of a step's collectives without the wait for other ranks.

In: a measured profile. Out: the same profile, in which each collective has the least duration of all ranks.
"""

from __future__ import annotations

from dataclasses import replace

from teraio.formats.plan_cache import fingerprint_of_profile
from teraio.formats.profile import Profile
from teraio.ranks import failures
from teraio.ranks.collective_times import is_collective, least_durations
from teraio.ranks.rank_store import RankStore


def with_least_durations(profile: Profile) -> Profile:
    """Return the profile with the least durations of all ranks for its collectives.

    If the store's server has ended, return the profile unchanged.
    """
    ticks = [tick for tick, kernel in enumerate(profile.kernels) if is_collective(kernel.name)]
    store = RankStore.of_process() if ticks and not failures.has_store_ended() else None
    if store is None:
        return profile
    own_ns = [profile.kernels[tick].duration_ns for tick in ticks]
    least_ns = least_durations(store.for_thread(), fingerprint_of_profile(profile), own_ns)
    kernels = list(profile.kernels)
    for tick, duration_ns in zip(ticks, least_ns):
        kernels[tick] = replace(kernels[tick], duration_ns=duration_ns)
    less_ns = sum(own_ns) - sum(least_ns)
    return replace(profile, kernels=tuple(kernels), step_ns=max(0, profile.step_ns - less_ns))


def waited_for_ranks_ns(profile: Profile) -> int:
    """Return how long the collectives of a step have waited for other ranks."""
    return profile.compute_ns - with_least_durations(profile).compute_ns
