"""Tests of plan_check. It accepts valid plans, names every fault, and counts the same bytes as a simple
ledger."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import cpu_limit
import pytest
import toys

from teraio.formats.plan import Evict, Fetch, Home, Plan
from teraio.formats.plan_check import check_plan_against_profile
from teraio.formats.profile import Kernel, Profile, Tensor
from teraio.passes.planner.planners import plan
from teraio.passes.planner.problem.problem import smallest_budget

MACHINE = toys.machine(device=1_000)


def plan_of(*moves: Evict | Fetch, budget: int = 8, homes: dict[str, str] | None = None) -> Plan:
    return Plan("", "hand", budget, tuple(Home(t, tier) for t, tier in (homes or {}).items()), moves)


def only_problem(made: Plan, profile: Profile) -> str:
    verdict = check_plan_against_profile(made, profile, MACHINE)
    assert not verdict.feasible
    assert len(verdict.problems) == 1, verdict.problems
    return verdict.problems[0]


# ---- compared with ledgers by hand ----

# The weight `w` is read at ticks 3 and 8 and written at tick 9. `w` is evicted twice per step.
CYCLE = toys.profile([toys.weight("w", 4, (3, 8), (9,))], 12)
CYCLE_MOVES = (
    Evict("w", "ssd", 11, 10),
    Fetch("w", "ssd", 2, 3),
    Evict("w", "ssd", 4),
    Fetch("w", "ssd", 7, 8),
)
EVICTED = (Evict("a", "ssd", free=4, trigger=1), Fetch("a", "ssd", trigger=6, ready=9))


def test_a_plan_that_fits_is_accepted_with_its_peak() -> None:
    # The tensor `a` (4 bytes) is evicted at ticks 4 and 5, when `b` (6 bytes) is alive. At the ten ticks from
    # 0 to 9, the tensors have 4 4 4 4 6 6 4 4 4 4 bytes.
    verdict = check_plan_against_profile(plan_of(*EVICTED), toys.diamond(), MACHINE)
    assert (verdict.feasible, verdict.peak_bytes, verdict.peak_tick, verdict.problems) == (True, 6, 4, ())


def test_bytes_count_until_free_and_from_trigger() -> None:
    # If `free` is one tick later (5), `a` is resident at tick 4, beside `b`. If the fetch's `trigger` is one
    # tick earlier (5), `a` is resident at tick 5, beside `b`.
    late = check_plan_against_profile(plan_of(replace(EVICT, free=5), FETCH), toys.diamond(), MACHINE)
    early = check_plan_against_profile(plan_of(EVICT, replace(FETCH, trigger=5)), toys.diamond(), MACHINE)
    assert (late.peak_bytes, late.peak_tick) == (10, 4)
    assert (early.peak_bytes, early.peak_tick) == (10, 5)
    assert "10 bytes are on the device, the plan's budget is 8 (2 too many)" in late.problems[0]


def test_workspace_counts_at_its_kernel() -> None:
    profile = toys.profile(list(toys.diamond().tensors), 10, workspace={5: 3})
    assert only_problem(plan_of(*EVICTED), profile).startswith("tick 5 (kernel 'k5'): 9 bytes")


def test_a_gap_may_cross_the_end_of_the_step() -> None:
    # The weight `w` (4 bytes) is read at tick 3 and written at tick 5, so it is dirty. It is evicted from
    # tick 7 of a step to tick 1 of the next step. A step has 10 ticks.
    profile = toys.profile([toys.weight("w", 4, (3,), (5,)), toys.activation("b", 6, 8, (9,))], 10)
    # Both fetches are the same move: in a step of 10 ticks, ticks 11 and 13 are ticks 1 and 3 of the next
    # step.
    for fetch in (Fetch("w", "ssd", 1, 3), Fetch("w", "ssd", 11, 13)):
        verdict = check_plan_against_profile(
            plan_of(Evict("w", "ssd", 7, 6), fetch, homes={"w": "ssd"}), profile, MACHINE
        )
        assert (verdict.problems, verdict.peak_bytes, verdict.peak_tick) == ((), 6, 8)


def test_a_move_may_be_in_flight_at_the_end_of_the_step() -> None:
    # The home of a tensor is the tier that holds the tensor at the end of the step. While an eviction is in
    # flight, the home is the device. While a fetch is in flight, the home is the SSD, although the bytes
    # count on the device.
    profile = toys.profile([toys.weight("w", 4, (4,), (5,))], 10)
    leaving = plan_of(Evict("w", "ssd", 11, 8), Fetch("w", "ssd", 3, 4))
    arriving = plan_of(Evict("w", "ssd", 7, 6), Fetch("w", "ssd", 9, 14), homes={"w": "ssd"})
    assert check_plan_against_profile(leaving, profile, MACHINE).problems == ()
    assert check_plan_against_profile(arriving, profile, MACHINE).problems == ()
    leaving, arriving = replace(leaving, homes=arriving.homes), replace(arriving, homes=leaving.homes)
    assert "so the home is 'device', not 'ssd'" in only_problem(leaving, profile)
    assert "so the home is 'ssd', not 'device'" in only_problem(arriving, profile)


def test_a_clean_tensor_is_dropped_without_a_write() -> None:
    # The weight `w` is written at tick 9 and then evicted. From tick 0 to tick 8 it is clean, so the second
    # eviction writes nothing.
    assert (
        check_plan_against_profile(plan_of(*CYCLE_MOVES, homes={"w": "ssd"}), CYCLE, MACHINE).problems == ()
    )


def test_a_tensor_that_no_kernel_writes_is_always_clean() -> None:
    profile = toys.profile([toys.weight("frozen", 4, (3, 8))], 12)
    assert check_plan_against_profile(
        plan_of(Evict("frozen", "ssd", 4), Fetch("frozen", "ssd", 7, 8)), profile, MACHINE
    ).feasible


def test_an_unused_tensor_may_have_an_ssd_home_without_moves() -> None:
    profile = toys.profile([toys.weight("spare", 100, ())], 3)
    assert check_plan_against_profile(plan_of(homes={"spare": "ssd"}), profile, MACHINE).peak_bytes == 0
    assert (
        "100 bytes are on the device" in check_plan_against_profile(plan_of(), profile, MACHINE).problems[0]
    )


def test_a_leaving_tensor_may_be_read_but_not_written() -> None:
    reads = toys.profile([toys.activation("a", 4, 0, (2, 9))], 10)
    writes = toys.profile([Tensor("a", "activation", 4, False, (9,), (0, 2))], 10)
    assert check_plan_against_profile(plan_of(*EVICTED), reads, MACHINE).feasible
    assert "its copy would be torn" in only_problem(plan_of(*EVICTED), writes)


def test_a_step_without_kernels_counts_persistent_tensors() -> None:
    profile = toys.profile([toys.weight("w", 4, ())], 0)
    assert check_plan_against_profile(plan_of(), profile, MACHINE).peak_bytes == 4
    assert (
        "no kernels"
        in check_plan_against_profile(plan_of(Evict("w", "ssd", 0)), profile, MACHINE).problems[0]
    )


# ---- faults: valid plans with one error ----

EVICT, FETCH = EVICTED


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ((EVICT,), "used by the kernel, but 'a' is evicted"),
        ((FETCH,), "the tensor is on the device, not evicted"),
        ((EVICT, FETCH, FETCH), "the tensor is arriving, not evicted"),
        ((EVICT, EVICT, FETCH), "the tensor is leaving, not on the device"),
        ((EVICT, replace(FETCH, ready=5)), "are no span within"),
        ((replace(EVICT, free=0), FETCH), "are no span within"),
        ((replace(EVICT, trigger=-3), FETCH), "are no span within"),
        ((replace(EVICT, free=40), FETCH), "are no span within"),
        ((replace(EVICT, trigger=0, free=4), FETCH), "lie outside the life of 'a', which is made at tick 0"),
        ((EVICT, replace(FETCH, ready=10)), "lie outside the life of 'a'"),
        ((EVICT, replace(FETCH, trigger=3)), "the tensor is leaving, not evicted"),
        ((replace(EVICT, trigger=None), FETCH), "there is no good copy in 'ssd'"),
        ((EVICT, replace(FETCH, source="host")), "there is no good copy in 'host'"),
        ((replace(EVICT, to="device"), FETCH), "not a tier to move to or from"),
        ((*EVICTED, Fetch("ghost", "ssd", 1, 2)), "no tensor of that name in profile 'toy'"),
    ],
)
def test_a_fault_is_found_and_named(moves: tuple[Evict | Fetch, ...], message: str) -> None:
    problems = check_plan_against_profile(plan_of(*moves), toys.diamond()).problems
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("moves", "homes", "messages"),
    [
        (CYCLE_MOVES, {}, "the tensor is on the device, not evicted"),
        (CYCLE_MOVES[1:], {"w": "ssd"}, "there is no good copy in 'ssd'|at its start"),
        (CYCLE_MOVES[:1] + CYCLE_MOVES[2:], {"w": "ssd"}, "is evicted"),
        (CYCLE_MOVES, {"w": "host"}, "no tier 'host'"),
        ((replace(CYCLE_MOVES[0], trigger=None), *CYCLE_MOVES[1:]), {"w": "ssd"}, "no good copy in 'ssd'"),
        ((CYCLE_MOVES[0], CYCLE_MOVES[1]), {"w": "ssd", "x": "ssd"}, "home of 'x': no tensor of that name"),
        ((Evict("w", "tape", 11, 10), Fetch("w", "tape", 2, 3)), {"w": "tape"}, "no link from 'device'"),
        (
            (Evict("w", "ssd", 13, 10), Fetch("w", "ssd", 11, 15)),
            {},
            "both are in flight at the end of the step",
        ),
    ],
)
def test_a_fault_around_the_end_of_the_step_is_found(
    moves: tuple[Evict | Fetch, ...], homes: dict[str, str], messages: str
) -> None:
    problems = check_plan_against_profile(plan_of(*moves, homes=homes), CYCLE, MACHINE).problems
    assert any(part in problem for problem in problems for part in messages.split("|")), problems


def test_a_stale_copy_is_not_good_enough_for_a_drop() -> None:
    # The only write of `w` to the SSD (tick 4) is before the kernel that changes `w` (tick 9), so the copy is
    # stale.
    moves = (Evict("w", "ssd", 5, 4), Fetch("w", "ssd", 7, 8), Evict("w", "ssd", 10), Fetch("w", "ssd", 2, 3))
    assert "there is no good copy in 'ssd'" in only_problem(plan_of(*moves, homes={"w": "ssd"}), CYCLE)


def test_two_homes_recompute_and_small_tiers_are_refused() -> None:
    twice = replace(plan_of(), homes=(Home("a", "ssd"), Home("a", "device")))
    assert "both 'ssd' and 'device'" in check_plan_against_profile(twice, toys.diamond()).problems[0]
    again = replace(plan_of(*EVICTED), recompute=("a",))
    assert "recompute of 'a' is not possible" in check_plan_against_profile(again, toys.diamond()).problems[0]
    small = toys.machine(device=5, ssd=3)
    assert check_plan_against_profile(plan_of(*EVICTED), toys.diamond(), small).problems == (
        "tier 'device': the plan needs 6 bytes, the capacity is 5",
        "tier 'ssd': the plan needs 4 bytes, the capacity is 3",
    )


def test_short_lived_copies_share_a_tier_in_time() -> None:
    # The tensor `a` is fetched before `b` is evicted, so 4 bytes on the SSD are enough for both.
    profile = toys.profile([toys.activation("a", 4, 0, (5,)), toys.activation("b", 4, 6, (11,))], 12)
    moves = (
        Evict("a", "ssd", 2, 1),
        Fetch("a", "ssd", 4, 5),
        Evict("b", "ssd", 8, 7),
        Fetch("b", "ssd", 10, 11),
    )
    assert check_plan_against_profile(plan_of(*moves), profile, toys.machine(ssd=4)).feasible


# ---- compared with a slow and simple ledger ----


# The number of successive steps in the simple ledger. From the third step on, the ledger has recorded all
# valid copies. The last step is the steady state.
STEPS = 4
EVENTS = {
    "issue": ("device", "leaving"),
    "free": ("leaving", "evicted"),
    "drop": ("device", "evicted"),
    "fetch": ("evicted", "arriving"),
    "ready": ("arriving", "device"),
}


def naive_events(
    tensor: Tensor, moves: list[Evict | Fetch], ticks: int
) -> list[tuple[int, int, str, str]] | None:
    """Return a sorted list of the tensor's events. Each event is (tick, order in the tick, event, tier).

    For a tensor that exists when the next step begins, the list covers three earlier steps and then STEPS
    steps. For another tensor, the list covers one step. If the ticks of a move are impossible, return None.
    """
    uses, out = [*tensor.reads, *tensor.writes], []
    for move in moves:
        tier = move.to if isinstance(move, Evict) else move.source
        end = move.free if isinstance(move, Evict) else move.ready
        begin = end if move.trigger is None else move.trigger
        if not 0 <= begin <= end < begin + ticks or begin >= 2 * ticks:
            return None
        born = -1 if tensor.kind == "input" else min(uses, default=0)
        if not tensor.outlives_step and not born < begin <= end <= max(uses):
            return None
        names = ["drop"] if move.trigger is None else ["issue", "free"]
        names = names if isinstance(move, Evict) else ["fetch", "ready"]
        for step in range(-3, STEPS) if tensor.outlives_step else range(1):
            if tensor.born is not None and begin + step * ticks < tensor.born:
                continue  # this move is of an earlier life
            for name, tick in zip(names, (begin, end)):
                out.append((tick + step * ticks, [*EVENTS].index(name), name, tier))
    return sorted(out)


def naive_walk(tensor: Tensor, made: Plan, ticks: int) -> list[bool] | None:
    """Return a list with one entry per tick of the last step: True if the tensor uses device memory at this
    tick.

    Return None if the plan is invalid.
    """
    moves = [move for move in made.moves if move.tensor == tensor.name]
    home = next((h.tier for h in made.homes if h.tensor == tensor.name), "device")
    events = naive_events(tensor, moves, ticks)
    uses = {*tensor.reads, *tensor.writes}
    if events is None or (home != "device" and not tensor.outlives_step) or tensor.born is not None:
        return None if events is None or tensor.born is None else naive_lives(tensor, home, events, ticks)
    # A move that begins before tick 0 and has not ended at tick 0 is in flight. Only one move of a tensor may
    # be in flight.
    flights = []
    for _, _, name, tier in [event for event in events if event[0] < 0]:
        if name in ("issue", "fetch"):
            flights.append((name, tier))
        elif name in ("free", "ready") and flights:
            flights.pop(0)
    if len(flights) > 1 or (flights and home != ("device" if flights[0][0] == "issue" else flights[0][1])):
        return None
    start = EVENTS[flights[0][0]][1] if flights else "device" if home == "device" else "evicted"
    state = start if tensor.persistent or tensor.kind == "input" else "unborn"
    copies = {home} | {move.to for move in moves if isinstance(move, Evict)} if tensor.persistent else set()
    rows = []
    for tick in range(ticks * STEPS if tensor.persistent else ticks):
        if tensor.persistent and tick % ticks == 0 and state != start:
            return None
        for _, _, name, tier in [event for event in events if event[0] == tick]:
            known = tick >= 2 * ticks or not tensor.persistent
            if state != EVENTS[name][0] or (known and name in ("drop", "fetch") and tier not in copies):
                return None
            state = EVENTS[name][1]
            copies |= {tier} if name == "free" else set()
        if tick % ticks in uses:
            state = "device" if state == "unborn" else state
            if state in ("evicted", "arriving") or (state == "leaving" and tick % ticks in tensor.writes):
                return None
            copies = set() if tick % ticks in tensor.writes else copies
        rows.append(state not in ("evicted", "unborn") and (tensor.persistent or tick <= max(uses)))
    return rows[-ticks:] if state == start or not tensor.persistent else None


def naive_lives(
    tensor: Tensor, home: str, events: list[tuple[int, int, str, str]], ticks: int
) -> list[bool] | None:
    """Return the list of `naive_walk` for a tensor that each step creates, and that the next step frees."""
    born = tensor.born or 0
    uses = {*tensor.reads, *tensor.writes}
    last = max(tick for tick in uses if tick < born)
    state, flight, copies = "unborn", "", set[str]()
    rows = [False] * born
    for tick in range(born, ticks * STEPS):
        at_home = {"evicted": copies, "arriving": {flight}}.get(state, {"device"})
        if tick % ticks == 0 and home not in at_home:
            return None
        for _, _, name, tier in [event for event in events if event[0] == tick]:
            if state != EVENTS[name][0] or (name in ("drop", "fetch") and tier not in copies):
                return None
            state, flight = EVENTS[name][1], tier
            copies |= {tier} if name == "free" else set()
        if tick % ticks in uses:
            state = "device" if tick % ticks == born and state == "unborn" else state
            if state not in ("device", "leaving") or (state == "leaving" and tick % ticks in tensor.writes):
                return None
            copies = set() if tick % ticks in tensor.writes else copies
        rows.append(state not in ("evicted", "unborn"))
        if tick % ticks == last:
            if state != "device":
                return None
            state = "unborn"
    return rows[-ticks:]


def naive_ledger(made: Plan, profile: Profile) -> list[int] | None:
    """Return the number of bytes on the device at each tick of the last of STEPS successive steps.

    Return None if the plan is invalid.
    """
    rows = [kernel.workspace_bytes for kernel in profile.kernels]
    for tensor in profile.tensors:
        resident = naive_walk(tensor, made, len(rows))
        if resident is None:
            return None
        rows = [total + tensor.size_bytes * counts for total, counts in zip(rows, resident)]
    return rows


def budget_between(profile: Profile, share: float) -> int:
    floor = smallest_budget(profile)
    everything = check_plan_against_profile(Plan("", "", 0), profile).peak_bytes
    return floor + int(share * (everything - floor))


def nudged(made: Plan, ticks: int, random: Random) -> Plan:
    """Return the plan with one or two random changes, and often also with a large budget.

    The changed plan may be valid or invalid.
    """
    moves, homes = list(made.moves), list(made.homes)
    for _ in range(random.choice((1, 1, 2))):
        if not moves:
            break
        at, by = random.randrange(len(moves)), random.choice((-ticks, -1, -1, 1, 1, 2, ticks))
        move = moves[at]
        match random.randrange(7), move:
            case (0, _):
                del moves[at]
            case (1, _) if homes:
                del homes[random.randrange(len(homes))]
            case (2, Evict()):
                moves[at] = replace(move, trigger=None if move.trigger is not None else move.free)
            case (3, Evict(trigger=int(trigger))):
                moves[at] = replace(move, trigger=trigger + by, free=move.free + random.choice((0, by)))
            case (3 | 4, Evict()):
                moves[at] = replace(move, free=move.free + by)
            case (3 | 4, Fetch()):
                moves[at] = replace(
                    move, trigger=move.trigger + by, ready=move.ready + random.choice((0, by))
                )
            case (5, Fetch()):
                moves[at] = replace(move, ready=move.ready + by)
            case (_, _):
                moves.append(replace(moves[random.randrange(len(moves))], tensor=move.tensor))
    budget = random.choice((made.budget_bytes, 1_000))
    return replace(made, budget_bytes=budget, moves=tuple(moves), homes=tuple(homes))


@pytest.mark.parametrize("block", range(4))
def test_the_check_agrees_with_steps_laid_end_to_end(block: int) -> None:
    counts = {True: 0, False: 0}
    for seed in range(block * 50, block * 50 + 50):
        random, profile = Random(seed), toys.random_profile(seed, 60, 6)
        machine = toys.machine(device=10_000, ssd=10_000, host=seed % 2 * 40)
        made = plan(profile, machine, budget_between(profile, seed % 5 / 5))
        for tried in (made, *(nudged(made, len(profile.kernels), random) for _ in range(16))):
            rows, verdict = naive_ledger(tried, profile), check_plan_against_profile(tried, profile)
            assert verdict.feasible == (rows is not None and max(rows) <= tried.budget_bytes), (seed, tried)
            if rows is not None:
                assert (verdict.peak_bytes, verdict.peak_tick) == (max(rows), rows.index(max(rows))), seed
            counts[verdict.feasible] += tried.moves != made.moves
    assert min(counts.values()) > 20, counts


# Make invalid variants of a valid plan. Each variant lowers the budget, or changes or removes one move or
# home.
def _faults(made: Plan, profile: Profile, random: Random) -> list[tuple[str, Plan]]:
    out = [
        (
            "budget below the peak",
            replace(made, budget_bytes=check_plan_against_profile(made, profile).peak_bytes - 1),
        )
    ]
    written = {tensor.name for tensor in profile.tensors if tensor.writes}
    for index in random.sample(range(len(made.moves)), min(3, len(made.moves))):
        move = made.moves[index]
        rest = made.moves[:index] + made.moves[index + 1 :]
        other = "host" if (move.to if isinstance(move, Evict) else move.source) == "ssd" else "ssd"
        bent: dict[str, Evict | Fetch] = {}
        match move:
            case Fetch():
                bent["trigger past ready"] = replace(move, trigger=move.ready + 1)
                bent["ready past the use"] = replace(move, ready=move.ready + 1)
                bent["fetch from elsewhere"] = replace(move, source=other)
            case Evict(trigger=int(trigger)):
                bent["free before trigger"] = replace(move, free=trigger - 1)
                if move.tensor in written:
                    bent["drop dirty"] = replace(move, trigger=None)
            case Evict():
                if move.tensor in written:
                    bent["drop from unwritten copy"] = replace(move, to=other)
        out.append(("a move less", replace(made, moves=rest)))
        out.append(("a move twice", replace(made, moves=(*made.moves, move))))
        out += [(name, replace(made, moves=(*rest, wrong))) for name, wrong in bent.items()]
    # Remove only homes of tensors that move. Without its home, a tensor without moves would always be
    # resident, and the plan would still be valid.
    for home in [home for home in made.homes if any(home.tensor == move.tensor for move in made.moves)][:2]:
        out.append(("home forgotten", replace(made, homes=tuple(h for h in made.homes if h != home))))
    return out


@pytest.mark.parametrize("block", range(2))
def test_planted_faults_are_found(block: int) -> None:
    planted: dict[str, int] = {}
    for seed in range(block * 75, block * 75 + 75):
        profile = toys.random_profile(seed)
        made = plan(profile, toys.machine(device=10_000, ssd=10_000), budget_between(profile, seed % 3 / 4))
        assert check_plan_against_profile(made, profile).feasible
        for name, broken in _faults(made, profile, Random(seed)):
            assert not check_plan_against_profile(broken, profile).feasible, (seed, name, broken)
            planted[name] = planted.get(name, 0) + 1
    assert len(planted) >= 9, planted
    assert sum(planted.values()) > 300, planted


# ---- duration of the check ----


def test_four_thousand_kernels_are_checked_in_a_second() -> None:
    kernels = tuple(Kernel(f"k{i}", 0, 1) for i in range(4_000))
    tensors = tuple(toys.weight(f"w{i}", 1, (i % 2_000,), (2_000 + i % 2_000,)) for i in range(7_000))
    moves = [
        move
        for i in range(7_000)
        for move in (
            Evict(f"w{i}", "ssd", 2_003 + i % 2_000, 2_001 + i % 2_000),
            Fetch(f"w{i}", "ssd", 4_000 + i % 2_000, 4_000 + i % 2_000),
        )
    ]
    homes = tuple(Home(f"w{i}", "ssd") for i in range(7_000) if 2_003 + i % 2_000 < 4_000)
    made = Plan("", "hand", 10_000, homes, tuple(moves))
    with cpu_limit.at_most(0.5):
        verdict = check_plan_against_profile(
            made, Profile("big", 0, kernels, tensors), toys.machine(device=10_000, ssd=10_000)
        )
    assert verdict.problems == ()
