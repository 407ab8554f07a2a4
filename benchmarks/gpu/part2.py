"""Part 2: training on the GPU is right. The same losses to the bit, within the budget, in every tier; a model
that does not fit trains; no copy races with a kernel.

With REHEARSE=1 in the environment all of it runs on the CPU, where host memory and the GPU's own figures are
left out.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from part1 import build, machine, ran, torch_on_gpu
from sections import Figures, NotSupported, Room, Section

REHEARSAL = bool(os.environ.get("REHEARSE"))
DEVICE = "cpu" if REHEARSAL else "cuda"
TRAINEE = Path(__file__).with_name("trainee.py")
SMALL: Figures = {
    "shape": {"vocabulary": 2048, "hidden": 256, "intermediate": 704, "layers": 4, "heads": 4, "key_heads": 2}
    if REHEARSAL
    else {"vocabulary": 8192, "hidden": 1024, "intermediate": 2816, "layers": 8, "heads": 8, "key_heads": 4},
    "batch": 4,
    "length": 128 if REHEARSAL else 512,
    "steps": 4,
    "clip": 1.0,
}
PARTS = (0.6, 0.4, 0.25)


def train(
    room: Room, asked: Figures, environment: dict[str, str] | None = None, script: Path = TRAINEE
) -> Figures:
    """What a trainee prints; an error is the end of the section."""
    settings = {**os.environ, "TERAIO_CACHE_DIR": "off", **(environment or {})}
    if asked["way"] != "teraio":
        settings["TERAIO_DISABLE"] = "1"
    done = ran([sys.executable, str(script), json.dumps({"device": DEVICE, **asked})], room, env=settings)
    if done.returncode:
        raise RuntimeError(f"{asked}: {done.stderr[-3000:]}")
    return {**json.loads(done.stdout.strip().splitlines()[-1]), "stderr": done.stderr}


def on_gpu() -> None:
    if not REHEARSAL:
        torch_on_gpu()


def plain_peak(plain: Figures) -> int:
    """On a CPU a guess is enough: what is rehearsed is the script."""
    return int(plain["allocated_bytes"]) or 200 * 2**20


def row(plain: Figures, ours: Figures) -> Figures:
    common = min(len(plain["losses"]), len(ours["losses"]))
    stats = ours["stats"]
    return {
        "equal": plain["losses"][:common] == ours["losses"][:common],
        "steps": common,
        "within": ours["allocated_bytes"] <= ours["budget_bytes"],
        **{name: ours[name] for name in ("allocated_bytes", "reserved_bytes", "budget_bytes")},
        **{name: stats.get(name) for name in ("misses", "step_misses", "skipped_moves", "overrun_bytes")},
        **{name: stats.get(name) for name in ("to_host_bytes", "from_host_bytes", "written_bytes")},
    }


def rows(room: Room, more: Figures, cases: dict[str, Figures]) -> Figures:
    """Each case beside one plain run; what is not equal or not within fails the section."""
    on_gpu()
    plain = train(room, {**SMALL, **more, "way": "plain", "warmup": 8})
    found = {}
    for name, case in cases.items():
        asked = {**SMALL, **more, **case, "way": "teraio", "peak": plain_peak(plain)}
        found[name] = row(plain, train(room, asked))
    wrong = [name for name, each in found.items() if not (each["equal"] and each["within"])]
    result = {"plain_bytes": plain["allocated_bytes"], "rows": found}
    if wrong:
        raise RuntimeError(f"{', '.join(wrong)}: {json.dumps(result)}")
    return result


def equal_eager(room: Room) -> Figures:
    """float32, the graph executed in order."""
    return rows(room, {"inner": "eager"}, {f"{part:.0%}": {"part": part} for part in PARTS})


def equal_inductor(room: Room) -> Figures:
    """Triton's kernels, autocast to bfloat16, fused AdamW."""
    more = {"inner": "inductor", "autocast": True, "fused": True}
    return rows(room, more, {f"{part:.0%}": {"part": part} for part in PARTS})


def tiers(room: Room) -> Figures:
    """All on the SSD, little host memory, much of it."""
    if REHEARSAL:
        raise NotSupported("there is no host memory beside RAM")
    cases = {host: {"part": 0.4, "options": {"host_memory": host}} for host in ("min", "256MiB", "16GiB")}
    found = rows(room, {"inner": "eager"}, cases)
    assert found["rows"]["min"]["to_host_bytes"] == 0 < found["rows"]["16GiB"]["to_host_bytes"]
    return found


def host_step(room: Room) -> Figures:
    """The optimizer on the host: within the budget, twice the same bits, and losses near those of the GPU's
    kernels, whose rounding is another."""
    if REHEARSAL:
        raise NotSupported("there is no host memory beside RAM")
    plain = train(room, {**SMALL, "inner": "eager", "fused": True, "way": "plain", "warmup": 8})
    asked = {
        **SMALL,
        "inner": "eager",
        "fused": True,
        "way": "teraio",
        "part": 0.4,
        "peak": plain_peak(plain),
    }
    asked["options"] = {"optimizer_step": "host"}
    once, again = (train(room, asked) for _ in range(2))
    apart = max(
        abs(float.fromhex(one) / float.fromhex(other) - 1)
        for one, other in zip(plain["losses"], once["losses"])
    )
    found = {**row(plain, once), "again": row(once, again)["equal"], "losses_apart": apart}
    if not (found["within"] and found["again"] and apart < 1e-3):
        raise RuntimeError(json.dumps(found))
    return found


def segments(room: Room) -> Figures:
    """The same with segments that grow: how much the allocator reserves beside what is allocated."""
    on_gpu()
    found = {}
    for setting in ("False", "True"):
        allocator = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{setting}"}
        plain = train(room, {**SMALL, "inner": "eager", "way": "plain"}, allocator)
        asked = {**SMALL, "inner": "eager", "way": "teraio", "part": 0.4, "peak": plain_peak(plain)}
        ours = train(room, asked, allocator)
        share = ours["reserved_bytes"] / ours["budget_bytes"]
        found[setting] = {**row(plain, ours), "reserved_per_budget": share}
    return found


def sanitizer(room: Room) -> Figures:
    """torch's own watch over streams: it reports copies and kernels that touch the same memory unordered."""
    if REHEARSAL:
        raise NotSupported("it watches streams of a GPU")
    on_gpu()
    asked = {**SMALL, "inner": "eager", "way": "teraio", "part": 0.4, "steps": 2}
    plain = train(room, {**SMALL, "inner": "eager", "way": "plain"})
    ours = train(room, {**asked, "peak": plain_peak(plain)}, {"TORCH_CUDA_SANITIZER": "1"})
    reports = ours["stderr"].count("CSAN detected")
    if reports:
        raise RuntimeError(f"{reports} reports: {ours['stderr'][-3000:]}")
    return {**row(plain, ours), "reports": reports}


def larger(room: Room) -> Figures:
    """The card is cut to half of what plain training takes: that fails, this goes on."""
    if REHEARSAL:
        raise NotSupported("only a card can be cut")
    torch = torch_on_gpu()
    plain = train(room, {**SMALL, "inner": "eager", "way": "plain"})
    card = torch.cuda.mem_get_info()[1]
    fraction = plain["allocated_bytes"] / 2 / card
    asked = {**SMALL, "inner": "eager", "fraction": fraction}
    try:
        train(room, {**asked, "way": "plain"})
    except RuntimeError as error:
        refused = "out of memory" in str(error)
    else:
        refused = False
    ours = train(
        room, {**asked, "way": "teraio", "part": 0.4, "peak": plain["allocated_bytes"], "init": True}
    )
    return {**row(plain, ours), "plain_is_refused": refused, "fraction": fraction}


SECTIONS = (
    Section(machine, 30),
    Section(build, 180),
    Section(equal_eager, 120),
    Section(tiers, 120),
    Section(host_step, 90),
    Section(segments, 90),
    Section(larger, 90),
    Section(sanitizer, 90),
    Section(equal_inductor, 300),
)
