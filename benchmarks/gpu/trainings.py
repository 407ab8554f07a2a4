"""The shapes of the trained models, and the jobs of each stage.

Small models train side by side, with budgets in bytes, and their results are compared to the bit. A large
model trains alone on the card, to measure its speed. The budgets of small models are shares of plain peaks
that were measured on the stand-in for a GPU. The peaks on a real card may differ, so each row has the real
ratio of budget and peak.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from beginning import REHEARSAL
from jobs import Figures, Job

TRAINEE = str(Path(__file__).with_name("trainee.py"))
SMOKE = str(Path(__file__).with_name("smoke.py"))
GIB = 2**30
MIB = 2**20
MORE_BYTES = 128 * MIB  # added to a budget that was too small; enough to measure the need of the job
MORE = " + 128 MiB"

ENVIRONMENT = {
    "TERAIO_CACHE_DIR": "off",
    "TERAIO_PLAN_TIME": "3s",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "4"),
}
# Without CUBLAS_WORKSPACE_CONFIG, cuBLAS may add numbers in another order. Without
# TORCHINDUCTOR_DETERMINISTIC, Inductor chooses how to split a sum by measurements, which differ between
# processes.
IN_ORDER = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1"}


@dataclass(frozen=True, slots=True)
class Small:
    """A small model, whose results are compared to the bit.

    `peak_bytes` is the approximate peak of plain training.
    """

    asked: Figures
    peak_bytes: int


def shape(
    vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, key_heads: int
) -> Figures:
    return {
        "vocabulary": vocabulary,
        "hidden": hidden,
        "intermediate": intermediate,
        "layers": layers,
        "heads": heads,
        "key_heads": key_heads,
    }


TINY = shape(1024, 256, 704, 1, 4, 2)
# A factor for time limits. A rehearsal needs more time, because Inductor and ptxas have only two cores.
SLOW = 3.0 if REHEARSAL else 1.0
ORDERED: Figures = {"clip": 1.0, "deterministic": True, "attention": "math", "steps": 4, "warmup": 8}
COMPILED: Figures = {**ORDERED, "autocast": True}
if REHEARSAL:
    EAGER = Small(
        {**ORDERED, "inner": "eager", "shape": TINY, "batch": 2, "length": 64, "warmup": 5, "steps": 2},
        20_300_000,
    )
    INDUCTOR = Small(
        {**COMPILED, "steps": 1, "warmup": 2, "shape": TINY, "batch": 2, "length": 64},
        35_000_000,
    )
    LARGE_SHAPE, LARGE_BATCH, LENGTH = TINY, 2, 64
else:
    EAGER = Small(
        {**ORDERED, "inner": "eager", "shape": shape(8192, 1024, 2816, 6, 8, 4), "batch": 4, "length": 256},
        1_620_000_000,
    )
    INDUCTOR = Small(
        {**COMPILED, "shape": shape(8192, 1024, 2816, 4, 8, 4), "batch": 8, "length": 512},
        2_300_000_000,
    )
    LARGE_SHAPE, LARGE_BATCH, LENGTH = shape(32000, 4096, 14336, 12, 32, 8), 8, 2048

LARGE: Figures = {
    "shape": LARGE_SHAPE,
    "batch": LARGE_BATCH,
    "length": LENGTH,
    "dtype": "bfloat16",
    "warmup": 3,
    "steps": 1 if REHEARSAL else 6,
    "way": "plain",
}
LARGE_GIB = 0.5 if REHEARSAL else 58.0
PROBE: Figures = {
    "way": "teraio",
    "autocast": True,
    "shape": TINY,
    "batch": 2,
    "length": 64 if REHEARSAL else 256,
    "warmup": 4,
    "steps": 1 if REHEARSAL else 3,
}
PROBE_BYTES = 400 * MIB  # for the engine's reserve and the GPU libraries; the model is tiny
WARMUP = {"warmup": 1} if REHEARSAL else {}
HOST = {"host_memory": "512MiB" if REHEARSAL else "8GiB", **WARMUP}
SSD = {"host_memory": "min", **WARMUP}
ON_HOST = {**HOST, "optimizer_step": "host"}


def trained(name: str, asked: Figures, limit_s: float = 150, gib: float = 3.0, **settings: object) -> Job:
    """Return a job that runs one training in its own process."""
    environment = {**ENVIRONMENT, **(IN_ORDER if asked.get("deterministic") else {})}
    if asked["way"] == "plain":
        environment["TERAIO_DISABLE"] = "1"
    environment |= dict(settings.pop("environment", {}))  # type: ignore[call-overload]
    command = (sys.executable, TRAINEE, json.dumps(asked))
    return Job(
        name,
        command,
        limit_s * SLOW,
        gib,
        environment=tuple(environment.items()),
        asked=asked,
        **settings,  # type: ignore[arg-type]
    )


def again(job: Job, name: str, limit_s: float = 0, environment: Figures | None = None, **more: object) -> Job:
    """Return a job that repeats the training of `job` with some settings changed."""
    return trained(
        name, {**job.asked, **more}, limit_s or job.limit_s / SLOW, job.gib, environment=environment or {}
    )


def with_more(name: str) -> str:
    """Return the name of the job that repeats the named job with a larger budget."""
    return name + MORE


def plain(name: str, small: Small, **more: object) -> Job:
    return trained(name, {**small.asked, **more, "way": "plain"}, gib=1.3 * small.peak_bytes / GIB + 1)


def ours(name: str, small: Small, share: float, options: Figures, **more: object) -> Job:
    memory = int(small.peak_bytes * share)
    asked = {**small.asked, **more, "way": "teraio", "memory": memory, "options": options}
    return trained(name, asked, gib=1.3 * memory / GIB + 1.2)


# Flash attention is deterministic only with `strict`.
FLASH: Figures = {"attention": "flash", "deterministic": "strict"}
CUDNN: Figures = {"attention": "cudnn"}


def probes() -> list[Job]:
    """Return jobs that train a tiny model, one with cuDNN's attention and one with flash attention.

    The results decide which kind of attention the large model uses.
    """
    asked = {**PROBE, "memory": PROBE_BYTES, "options": HOST}
    return [trained(f"probe {kind}", {**asked, "attention": kind}, 100, 2.0) for kind in ("cudnn", "flash")]


def bits() -> list[Job]:
    """Return the jobs whose results are compared to the bit.

    The most useful jobs come first, because time may run out.
    """
    cut = EAGER.peak_bytes // 2
    return [
        plain("eager plain", EAGER),
        ours("eager 40% host", EAGER, 0.4, HOST),
        plain("inductor plain", INDUCTOR),
        ours("inductor 40% host", INDUCTOR, 0.4, HOST),
        ours("eager 25% ssd", EAGER, 0.25, SSD),
        plain("eager plain again", EAGER),
        ours("inductor 25% ssd", INDUCTOR, 0.25, SSD),
        plain("inductor plain again", INDUCTOR),
        ours("eager 40% late", EAGER, 0.4, {**HOST, "updates": "late"}),
        ours("eager 40% backward", EAGER, 0.4, {**HOST, "updates": "backward"}),
        ours("flash 40% host", INDUCTOR, 0.4, HOST, **FLASH),
        plain("flash plain", INDUCTOR, **FLASH),
        ours("cudnn 40% host", INDUCTOR, 0.4, HOST, **CUDNN),
        plain("cudnn plain", INDUCTOR, **CUDNN),
        plain("cudnn plain again", INDUCTOR, **CUDNN),
        ours("host step 40%", EAGER, 0.4, ON_HOST, threads=4),
        plain("host step plain", EAGER, optimizer="host", threads=4),
        plain("cut plain", EAGER, cap=cut, steps=1, warmup=2),
        ours("cut 40% host", EAGER, 0.4, HOST, cap=cut, init=True),
    ]


# For each run: the plain run that its losses are compared with, and a repetition of that plain run, or "".
REFERENCES = {
    "eager 40% host": ("eager plain", "eager plain again"),
    "eager 25% ssd": ("eager plain", "eager plain again"),
    "eager 40% late": ("eager plain", "eager plain again"),
    "eager 40% backward": ("eager plain", "eager plain again"),
    "inductor 40% host": ("inductor plain", "inductor plain again"),
    "inductor 25% ssd": ("inductor plain", "inductor plain again"),
    "flash 40% host": ("flash plain", ""),
    "cudnn 40% host": ("cudnn plain", "cudnn plain again"),
    "host step 40%": ("host step plain", ""),
    "cut 40% host": ("eager plain", "eager plain again"),
    "sanitizer": ("eager plain", "eager plain again"),
}


def sanitizer() -> Job:
    """Return a training under torch's stream sanitizer.

    The sanitizer raises an error when two streams use the same memory without an order between them. It
    checks teraio's copies to and from host memory, but no copies to and from the SSD.
    """
    return again(ours("", EAGER, 0.4, HOST), "sanitizer", 100, sanitize=True, steps=2)


def compile_large(large: Figures) -> list[Job]:
    """Return jobs that train the large model for two steps. They fill Inductor's cache, so that the timed
    jobs need not compile.
    """
    asked = {**large, "warmup": 1, "steps": 1, "unplanned": True}
    ours = {**asked, "way": "teraio", "memory": int(LARGE_GIB * GIB * 0.6), "options": {"host_memory": "80%"}}
    first = trained("large compile plain", asked, 200, LARGE_GIB)
    second = trained("large compile teraio", ours, 200, LARGE_GIB * 0.7, after=(first.name,))
    return [first, second]


def speed_plain(large: Figures) -> Job:
    return trained("large plain", large, 90, LARGE_GIB, least_s=30)


def speed(large: Figures, peak_bytes: int, share: float, **options: object) -> Job:
    step = " host step" if options.get("optimizer_step") else ""
    asked = {**large, "way": "teraio", "memory": int(peak_bytes * share), "options": {**options, **WARMUP}}
    asked["threads"] = (os.cpu_count() or 1) if step else 1
    environment = {"TERAIO_PLAN_TIME": "8s"}
    return trained(f"large {share:.0%}{step}", asked, 130, LARGE_GIB, least_s=45, environment=environment)
