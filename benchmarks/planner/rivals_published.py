"""Cards, published figures of other systems, and the cases that rivals.py plans beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from teraio.formats.machine import Machine
from teraio.formats.shipped_files import read_named_machine
from teraio.passes.synth.models import MODELS, Decoder
from teraio.passes.synth.profiles import ProfileRequest, count_parameters, synth

GIGA, TERA = 10**9, 10**12


@dataclass(frozen=True, slots=True)
class Card:
    """Data sheet figures of a card. `dollars_per_hour` is an assumption, not a quote of a vendor."""

    name: str
    peak_flop_per_s: int  # dense bf16 with fp32 accumulation
    bandwidth_bytes_per_s: int
    dollars_per_hour: float
    source: str


ADA = "NVIDIA Ada whitepaper, appendix A"
CARDS = {
    "rtx4090": Card("RTX 4090", 1652 * TERA // 10, 1_008 * GIGA, 0.40, ADA),
    "h100": Card("H100 SXM", 989 * TERA, 3_350 * GIGA, 2.65, "NVIDIA H100 data sheet"),
    "gh200": Card("GH200 96 GB", 989 * TERA, 4_000 * GIGA, 2.00, "NVIDIA GH200 data sheet"),
    "gb200": Card("GB200", 2_500 * TERA, 8_000 * GIGA, 5.00, "NVIDIA GB200 NVL72 data sheet"),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step: `micro_batches` times `batch` sequences."""

    model: str
    sequence: int
    batch: int
    micro_batches: int = 1
    frozen: bool = False
    loss_chunks: int = 8

    @property
    def tokens(self) -> int:
        return self.sequence * self.batch * self.micro_batches


@dataclass(frozen=True, slots=True)
class Case:
    """A step that is planned on a machine, with matrix products at a percentage of the card's peak."""

    machine: str
    step: Step
    efficiency_percent: int
    limit_s: float = 12.0

    @property
    def card(self) -> str:
        return self.machine.partition("-")[0]


def cases_on(machines: tuple[str, ...], step: Step, percents: tuple[int, ...]) -> list[Case]:
    """Return a case for each machine and efficiency. Large steps get more time for planning."""
    limit_s = 20.0 if step.model == "llama-3.1-70b" and not step.frozen else 8.0
    return [Case(machine, step, percent, limit_s) for machine in machines for percent in percents]


# Shapes of the configurations on Hugging Face, without the biases of query, key and value: 0.002 % of the
# parameters.
MORE_MODELS = {
    "qwen2.5-7b": Decoder(152064, 3584, 28, 28, 4, 128, 18944),
    "qwen2.5-14b": Decoder(152064, 5120, 48, 40, 8, 128, 13824),
}


@dataclass(frozen=True, slots=True)
class Work:
    """The model's operations for one token, without recomputation, and the number of parameters."""

    parameters: int
    flop_per_token: int


for _name, _shape in MORE_MODELS.items():
    MODELS[_name] = _shape, 0


@cache
def work_of(model: str, sequence: int, frozen: bool) -> Work:
    """Count the matrix products of forward and backward: 6 operations per parameter and token, or 4 if the
    weights are frozen. The table of the embedding multiplies nothing. Causal attention adds its products."""
    shape = MODELS[model][0]
    assert isinstance(shape, Decoder)
    parameters = count_parameters(synth(model, ProfileRequest(sequence=8)))
    table = 0 if shape.tied else shape.vocabulary * shape.hidden
    attention = 6 * shape.layers * shape.heads * shape.head_size * sequence
    return Work(parameters, (4 if frozen else 6) * (parameters - table) + attention)


def machine_of(case: Case) -> Machine:
    """Return the case's machine. A name such as `rtx4090-1ssd+176GB` sets its host memory for tensors."""
    name, _, host = case.machine.partition("+")
    machine = read_named_machine(name)
    if not host:
        return machine
    size = int(host.removesuffix("GB")) * GIGA
    tiers = tuple(
        replace(tier, capacity_bytes=size) if tier.name == "host" else tier for tier in machine.tiers
    )
    return replace(machine, name=case.machine, tiers=tiers)


@dataclass(frozen=True, slots=True)
class Published:
    """A published figure, and the machines and efficiencies of the plans beside it."""

    system: str
    card: str
    step: Step
    tokens_per_s: float
    source: str
    conditions: str
    machines: tuple[str, ...]
    percents: tuple[int, ...]

    @property
    def cases(self) -> list[Case]:
        return cases_on(self.machines, self.step, self.percents)


PC = ("rtx4090-1ssd", "rtx4090-4ssd")
ALL = (50, 70, 90)
TWO = (50, 70)

LLMQ_4090 = "LLMQ, benchmarks/4090x1.md"
LLMQ_H100 = "LLMQ, benchmarks/H100x1.md"
ZERO_CSV = "SlideFormer, bench/DeepSpeed/*.csv"
ROUNDPIPE = "RoundPipe, README.md"

_8B = {batch: Step("llama-3.1-8b", 1024, batch) for batch in (8, 16, 32, 64)}
_7B_LLMQ = Step("qwen2.5-7b", 1024, 64, 8)
_14B_LLMQ = Step("qwen2.5-14b", 1024, 64, 8)
_32B = Step("qwen3-32b", 1024, 64)
# The same step with larger micro-batches, which need more memory: the planner is faster with fewer kernels.
_14B_H100 = Step("qwen2.5-14b", 1024, 256, 2)
_70B = Step("llama-3.1-70b", 4096, 32)

ZERO_3_CONDITIONS = "176 GB of host memory"
LLMQ_CONDITIONS = "moments in bf16, in host memory"
ROUNDPIPE_CONDITIONS = "fp16 accumulation, asynchronous optimizer; sequence and batch not stated"

# A step of 512 sequences takes minutes, so one drive is enough. More drives would not make it shorter.
ONE = ("rtx4090-1ssd",)
PUBLISHED = (
    *(
        Published("ZeRO-3 offload", "rtx4090", _8B[batch], tokens_per_s, ZERO_CSV, ZERO_3_CONDITIONS, PC, TWO)
        for batch, tokens_per_s in ((8, 913.6), (16, 1372.9), (32, 1790.9))
    ),
    Published("RoundPipe", "rtx4090", _8B[64], 3142, ROUNDPIPE, ROUNDPIPE_CONDITIONS, PC, ALL),
    Published("RoundPipe", "rtx4090", _32B, 740, ROUNDPIPE, ROUNDPIPE_CONDITIONS, PC, ALL),
    Published("LLMQ", "rtx4090", _7B_LLMQ, 2777, LLMQ_4090, LLMQ_CONDITIONS, ONE, ALL),
    Published("LLMQ", "rtx4090", _14B_LLMQ, 1348, LLMQ_4090, LLMQ_CONDITIONS, ONE, (50,)),
    Published("LLMQ", "h100", _14B_H100, 6321, LLMQ_H100, LLMQ_CONDITIONS, ("h100-4ssd",), TWO),
)

_MODERN = ("h100-4ssd", "gh200-4ssd", "gb200-4ssd")
OTHER_MACHINES = (
    *cases_on(_MODERN, _8B[64], (70,)),
    *cases_on(_MODERN, _70B, (70,)),
    *cases_on(("h100-4ssd",), _70B, TWO),
)
LORA = Step("llama-3.1-70b", 1024, 32, frozen=True, loss_chunks=16)
LONG = Step("llama-3.1-8b", 131072, 1, loss_chunks=64)
# As much host memory as DeepSpeed used in the runs of ZeRO-3.
_SAME_HOST = [Case("rtx4090-1ssd+176GB", _8B[batch], 70, 6.0) for batch in (8, 16, 32, 64)]
RECIPES = (
    *_SAME_HOST,
    *cases_on(PC, LORA, (70,)),
    *cases_on(("h100-4ssd",), LONG, (70,)),
    *OTHER_MACHINES,
)
