"""Part 2: training on the GPU is right. The same losses to the bit, within the budget, in every tier; a model
that does not fit trains; no copy races with a kernel.

Rehearsed as training.py says.
"""

from __future__ import annotations

from functools import partial

from part1 import REHEARSAL, build, machine, torch_on_gpu
from sections import Figures, NotSupported, Room, Section, each
from training import SMALL, judge, memory, on_gpu, plain, plain_peak, row, train

PARTS = (0.4, 0.25, 0.6)
EAGER: Figures = {**SMALL, "inner": "eager"}
AUTOCAST: Figures = {**SMALL, "inner": "inductor", "autocast": True, "fused": True}
PLAIN_AGAIN = "plain again"


def beside(room: Room, asked: Figures, cases: dict[str, Figures]) -> Figures:
    """Each case beside a plain run, which is beside one more of its kind: where that differs from itself,
    nothing can be said of the others' losses."""
    on_gpu()
    reference = plain(room, asked)
    peak = plain_peak(reference)

    def again() -> Figures:
        return {"equal": plain(room, {**asked, "take": 2})["losses"] == reference["losses"]}

    def case(own: Figures) -> Figures:
        return row(reference, train(room, {**asked, **own, "way": "teraio", "peak": peak}))

    found = each(room, {PLAIN_AGAIN: again}, {"plain": memory(reference)})
    each(room, {name: partial(case, own) for name, own in cases.items()}, found)
    if found[PLAIN_AGAIN].get("equal") is not False:
        judge(room, found)
        return found
    for entry in found.values():
        if entry.get("equal") is False:
            entry["equal"] = "plain differs from itself"
    judge(room, found)
    raise NotSupported("plain differs from itself: whether teraio is equal cannot be said")


def parts(*shares: float) -> dict[str, Figures]:
    return {f"{share:.0%}": {"part": share} for share in shares}


def equal_inductor(room: Room) -> Figures:
    """What a user gets: Triton's kernels, autocast to bfloat16, fused AdamW. Attention by plain kernels, as
    the backward of others keeps no order."""
    return beside(room, AUTOCAST, parts(*PARTS))


def equal_flash(room: Room) -> Figures:
    """The same with flash attention, which keeps an order where torch is told to refuse what does not."""
    return beside(room, {**AUTOCAST, "deterministic": "strict"}, parts(0.4))


def equal_eager(room: Room) -> Figures:
    """float32, the graph executed in order."""
    return beside(room, EAGER, parts(*PARTS))


def tiers(room: Room) -> Figures:
    """All on the SSD, little host memory, much of it."""
    if REHEARSAL:
        raise NotSupported("there is no host memory beside RAM")
    cases = {host: {"part": 0.4, "options": {"host_memory": host}} for host in ("min", "256MiB", "16GiB")}
    found = beside(room, EAGER, cases)
    assert found["min"]["to_host_bytes"] == 0 < found["16GiB"]["to_host_bytes"]
    return found


def larger(room: Room) -> Figures:
    """The card is cut to half of what plain training takes: that fails, this goes on."""
    if REHEARSAL:
        raise NotSupported("only a card can be cut")
    torch = torch_on_gpu()
    reference = plain(room, EAGER)
    fraction = reference["allocated_bytes"] / 2 / torch.cuda.mem_get_info()[1]
    asked = {**EAGER, "fraction": fraction}

    def refused() -> Figures:
        try:
            train(room, {**asked, "way": "plain"})
        except RuntimeError as error:
            return {"out_of_memory": "out of memory" in str(error), "said": str(error)[-500:]}
        return {"out_of_memory": False}

    def ours() -> Figures:
        own = {"way": "teraio", "part": 0.4, "peak": reference["allocated_bytes"], "init": True}
        return {**row(reference, train(room, {**asked, **own})), "fraction": fraction}

    found = each(room, {"teraio": ours, "plain": refused})
    judge(room, found)
    if not found["plain"]["out_of_memory"]:
        raise RuntimeError("plain training fits into the half, or fails of something else: see rows")
    return found


def host_step(room: Room) -> Figures:
    """The optimizer on the host: within the budget, twice the same bits, and losses near those of the GPU's
    kernels, whose rounding is another."""
    if REHEARSAL:
        raise NotSupported("there is no host memory beside RAM")
    asked = {**EAGER, "fused": True}
    reference = plain(room, asked)
    own = {"way": "teraio", "part": 0.4, "peak": plain_peak(reference)}
    runs: list[Figures] = []

    def ours() -> Figures:
        runs.append(train(room, {**asked, **own, "options": {"optimizer_step": "host"}}))
        pairs = zip(reference["losses"], runs[-1]["losses"])
        apart = max(abs(float.fromhex(one) / float.fromhex(other) - 1) for one, other in pairs)
        return {**row(runs[0], runs[-1]), "losses_apart": apart}

    found = each(room, {"once": ours, "again": ours})
    judge(room, found)
    if not found["again"]["losses_apart"] < 1e-3:
        raise RuntimeError("losses are not near those of the GPU's kernels: see rows")
    return found


def segments(room: Room) -> Figures:
    """The same with and without segments that grow: how much the allocator reserves beside what is
    allocated."""
    on_gpu()

    def case(setting: str) -> Figures:
        allocator = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{setting}"}
        reference = plain(room, EAGER, allocator)
        asked = {**EAGER, "way": "teraio", "part": 0.4, "peak": plain_peak(reference)}
        ours = train(room, asked, allocator)
        return {**row(reference, ours), "reserved_per_budget": ours["reserved_bytes"] / ours["budget_bytes"]}

    found = each(room, {setting: partial(case, setting) for setting in ("False", "True")})
    if errors := [name for name, entry in found.items() if "error" in entry]:
        raise RuntimeError(f"{', '.join(errors)}: see rows")
    return found


def sanitizer(room: Room) -> Figures:
    """torch's own watch over streams: it reports copies and kernels that touch the same memory unordered,
    as an error of the training. Of teraio's copies it sees those to and from host memory, not the SSD's."""
    if REHEARSAL:
        raise NotSupported("it watches streams of a GPU")
    on_gpu()
    reference = plain(room, EAGER)
    asked = {**EAGER, "way": "teraio", "part": 0.4, "steps": 2, "sanitize": True}
    return row(reference, train(room, {**asked, "peak": plain_peak(reference)}))


# By worth: whoever has little time gets the first.
SECTIONS = (
    Section(machine, 30),
    Section(build, 180),
    Section(equal_inductor, 260),
    Section(equal_flash, 140),
    Section(equal_eager, 120),
    Section(tiers, 100),
    Section(larger, 90),
    Section(host_step, 90),
    Section(segments, 90),
    Section(sanitizer, 90),
)
