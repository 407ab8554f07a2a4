"""Profiles of models without a run of the model: one training step, kernel by kernel.

    synth("llama-3.1-8b", ProfileRequest(batch=4))     -> a profile

Nothing is measured. The profile describes a fused implementation: flash attention, fused norms and
activations, a chunked loss, and one AdamW kernel per parameter. It has the kernels, their order and the saved
tensors of such an implementation. The duration of a kernel is a launch overhead plus the larger of its
compute time and its memory time (`roofline`). `models` has the models. `tape` has the operators of the
models, with their backward kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from teraio.errors import OptionError
from teraio.formats.fields import suggest_nearest_name
from teraio.formats.profile import ENTRIES_MAX, Profile

from .models import MODELS, BatchShape
from .roofline import ProfileBuilder, Rates
from .tape import PRECISIONS, Tape, Weights

RATES = Rates()


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """A request for a profile. `batch` is the number of samples in one micro-batch.

    If `sequence` or `layers` is 0, the profile has the model's own number of tokens per sample or of layers.
    If `frozen` is True, no weight is trained. The step then is that of LoRA without the adapters.
    """

    batch: int = 1
    sequence: int = 0
    micro_batches: int = 1
    layers: int = 0
    precision: str = "bf16-mixed"
    checkpoint: bool = False
    loss_chunks: int = 8
    clip: bool = False
    frozen: bool = False
    rates: Rates = RATES


def synth(model: str, request: ProfileRequest | None = None) -> Profile:
    """Return the profile of one training step: forward and backward of each micro-batch, then the optimizer.

    Raise OptionError if the request is invalid, for example if the model is unknown.
    """
    request = _validate_and_complete_request(model, request or ProfileRequest())
    it = MODELS[model][0]
    recorder = ProfileBuilder(request.rates)
    weights = Weights(recorder, PRECISIONS[request.precision], request.frozen)
    shape = BatchShape(request.batch, request.sequence, request.loss_chunks)
    for micro in range(request.micro_batches):
        prefix = f"m{micro}." if request.micro_batches > 1 else ""
        tape = Tape(recorder, weights, prefix, request.checkpoint)
        recorder.begin_call(2 * micro, forward=True)
        it.add_forward_and_loss(tape, shape, request.layers)
        recorder.begin_call(2 * micro + 1)
        tape.add_backward_kernels()
    recorder.begin_call(2 * request.micro_batches)
    if request.clip:
        weights.add_clip_kernels()
    weights.add_adamw_kernels()
    return recorder.build_profile(_profile_name(model, request))


def count_parameters(profile: Profile, precision: str = "bf16-mixed") -> int:
    """Return the number of elements in the weights of a profile."""
    size = PRECISIONS[precision].weight_bytes
    return sum(tensor.size_bytes for tensor in profile.tensors if tensor.kind == "weight") // size


def _validate_and_complete_request(model: str, request: ProfileRequest) -> ProfileRequest:
    if model not in MODELS:
        known = f"there are {', '.join(MODELS)}"
        raise OptionError(f"model {model!r} is unknown{suggest_nearest_name(model, list(MODELS))}; {known}")
    it = MODELS[model][0]
    if request.precision not in PRECISIONS:
        raise OptionError(f"precision {request.precision!r} is unknown; there are {', '.join(PRECISIONS)}")
    if it.fixed_sequence and request.sequence not in {0, it.default_sequence}:
        raise OptionError(f"{model} has a fixed sequence of {it.default_sequence}; omit --sequence")
    request = replace(
        request, sequence=request.sequence or it.default_sequence, layers=request.layers or it.layers
    )
    if it.fixed_sequence:  # a model of images: its logits are small, so the loss needs only one chunk
        request = replace(request, loss_chunks=1)
    if request.frozen and request.clip:
        raise OptionError("--clip scales gradients of weights, and --frozen has none: omit one of them")
    limits = {
        "batch": 2**20,
        "sequence": 2**24,
        "micro_batches": 2**12,
        "layers": 2**12,
        "loss_chunks": 2**12,
    }
    for name, most in limits.items():
        if not 1 <= getattr(request, name) <= most:
            raise OptionError(f"--{name.replace('_', '-')} is {getattr(request, name)}; give 1 to {most}")
    if request.batch * request.sequence % request.loss_chunks:
        tokens = request.batch * request.sequence
        raise OptionError(f"--loss-chunks {request.loss_chunks} does not divide the {tokens} tokens evenly")
    kernels = request.micro_batches * request.layers * 64
    if kernels > ENTRIES_MAX:
        raise OptionError(
            f"{request.micro_batches} micro-batches of {request.layers} layers have about {kernels} kernels; "
            f"a profile has at most {ENTRIES_MAX}. Give fewer micro-batches; all have the same kernels"
        )
    return request


def _profile_name(model: str, request: ProfileRequest) -> str:
    layers = f"-l{request.layers}" if request.layers != MODELS[model][0].layers else ""
    micro = f"x{request.micro_batches}" if request.micro_batches > 1 else ""
    checkpoint = "-checkpoint" if request.checkpoint else ""
    more = "-clip" if request.clip else "-frozen" if request.frozen else ""
    return (
        f"{model}{layers}-s{request.sequence}-b{request.batch}{micro}-{request.precision}{checkpoint}{more}"
    )
