"""Batches for models of other projects, made from names of arguments and fields of configurations.

Several guesses are tried for each model. The first guess that the model accepts is used.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from strangers.toy_configurations import FIRST_SPECIAL, IMAGE

PER_TOKEN = ("LM", "PreTraining", "ConditionalGeneration", "LMHeadModel")
SAMPLES = 2
LENGTH = 32
WAVE = 4000

Batch = dict[str, Any]
Maker = Callable[[torch.Generator], Batch]


@dataclass(frozen=True)
class Guess:
    """A choice for each property of a batch that the names of arguments and fields do not decide."""

    images: str  # "pixels", "frames", or "none" for text only
    sound: str  # position of the frames in a sound's shape: "last" or "middle"
    labels: str  # "kind" (the name of the class decides), "tokens", "classes", or "none"
    more: bool  # True to include arguments that are usually optional


def field(config: Any, *names: str, default: Any = None) -> Any:
    """Return the value of the first of these fields that a configuration or one of its parts has."""
    parts = [config, *(getattr(config, part, None) for part in getattr(config, "sub_configs", {}))]
    for name, part in itertools.product(names, parts):
        value = getattr(part, name, None) if part is not None else None
        if value is not None:
            return value
    return default


def makers(model: nn.Module, name: str, image_tokens: int, *, text_only: bool = False) -> Iterator[Maker]:
    arguments = set(inspect.signature(model.forward).parameters)
    guesses = itertools.product(
        ("none",) if text_only else ("pixels",) if image_tokens else ("pixels", "frames"),
        ("last", "middle") if arguments & {"input_features", "input_values"} else ("last",),
        ("kind", "tokens", "classes", "none") if arguments & {"labels", "start_positions"} else ("none",),
        (False, True),
    )
    for guess in guesses:
        yield partial(batch, model.config, arguments, name, Guess(*guess), image_tokens)


def batch(
    config: Any, arguments: set[str], name: str, guess: Guess, image_tokens: int, generator: torch.Generator
) -> Batch:
    words = min(field(config, "vocab_size", default=FIRST_SPECIAL), FIRST_SPECIAL)
    choices = (SAMPLES, 2) if name.endswith("MultipleChoice") else (SAMPLES,)
    tokens = torch.randint(3, max(words, 5), (*choices, LENGTH + image_tokens), generator=generator)
    ends_text = field(config, "eos_token_id", default=1)
    tokens[..., -1] = ends_text if isinstance(ends_text, int) else ends_text[0]
    made: Batch = {}
    if "input_ids" in arguments:
        made["input_ids"] = tokens
        if image_tokens:
            tokens[:, 1 : 1 + image_tokens] = field(config, "image_token_id", "image_token_index", default=0)
    if guess.more and "attention_mask" in arguments:
        made["attention_mask"] = torch.ones_like(tokens)
    made |= seen(config, arguments, guess, generator) | heard(config, arguments, guess, generator)
    made |= labelled(config, arguments, name, guess, tokens, generator)
    if "bbox" in arguments:
        corners = torch.randint(0, 50, (SAMPLES, LENGTH, 2), generator=generator)
        made["bbox"] = torch.cat([corners, corners + 20], -1)
    if "return_loss" in arguments:
        made["return_loss"] = True
    decoded = "decoder_input_ids" in arguments and (guess.labels == "none" or guess.more)
    if decoded and "labels" not in made:
        made["decoder_input_ids"] = tokens
    return made | forecast(config, arguments, generator) | decided(config, arguments, generator)


def seen(config: Any, arguments: set[str], guess: Guess, generator: torch.Generator) -> Batch:
    if guess.images == "none":
        return {}
    side = field(config, "image_size", "img_size", "input_size", default=IMAGE)
    sides = tuple(side)[-2:] if isinstance(side, list | tuple) else (side, side)
    channels = field(config, "num_channels", "in_channels", "num_input_channels", default=3)
    frames = (field(config, "num_frames", default=2),) if guess.images == "frames" else ()
    shape = (SAMPLES, *frames, channels, *(each or IMAGE for each in sides))
    pixels = torch.randn(shape, generator=generator)
    return {
        key: pixels
        for key in ("pixel_values", "pixel_values_videos")
        if key in arguments and (key == "pixel_values" or "pixel_values" not in arguments)
    }


def heard(config: Any, arguments: set[str], guess: Guess, generator: torch.Generator) -> Batch:
    bins = field(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", default=80)
    frames = 2 * field(config, "max_source_positions", default=0) or field(config, "max_length", default=256)
    spectra = (SAMPLES, bins, frames) if guess.sound == "last" else (SAMPLES, frames, bins)
    made: Batch = {}
    if "input_features" in arguments and guess.images != "none":
        made["input_features"] = torch.randn(spectra, generator=generator)
    if "input_values" in arguments:
        shape = (SAMPLES, WAVE) if guess.sound == "last" else (SAMPLES, frames, bins)
        made["input_values"] = torch.randn(shape, generator=generator)
    return made


def labelled(
    config: Any, arguments: set[str], name: str, guess: Guess, tokens: Tensor, generator: torch.Generator
) -> Batch:
    labels = getattr(config, "num_labels", 2)
    per_sample = torch.randint(0, labels, (SAMPLES,), generator=generator)
    ends = torch.randint(0, LENGTH, (SAMPLES,), generator=generator)
    marks = {"start_positions", "end_positions"} & arguments if guess.labels != "none" else set()
    made: Batch = dict.fromkeys(sorted(marks), ends)
    made |= {key: per_sample for key in ("next_sentence_label", "sentence_order_label") if key in arguments}
    if "labels" not in arguments or guess.labels == "none":
        return made
    if guess.labels == "tokens" or name.endswith(
        ("LM", "PreTraining", "ConditionalGeneration", "LMHeadModel")
    ):
        return {**made, "labels": tokens}
    if guess.labels == "kind" and name.endswith(("TokenClassification", "FrameClassification")):
        return {**made, "labels": torch.randint(0, labels, tokens.shape, generator=generator)}
    if guess.labels == "kind" and name.endswith("CTC"):
        return {**made, "labels": tokens[:, :4] % 20 + 3}
    if guess.labels == "kind" and name.endswith("SemanticSegmentation"):
        side = field(config, "image_size", default=IMAGE)
        side = side if isinstance(side, int) else side[0]
        return {**made, "labels": torch.randint(0, labels, (SAMPLES, side, side), generator=generator)}
    return {**made, "labels": per_sample}


def forecast(config: Any, arguments: set[str], generator: torch.Generator) -> Batch:
    """Make a batch for time-series models."""
    if "past_values" not in arguments:
        return {}
    channels = field(config, "num_input_channels", default=1)
    past = field(config, "context_length", default=0) + max(
        field(config, "lags_sequence", default=[0]) or [0]
    )
    future = field(config, "prediction_length", default=8)
    features = field(config, "num_time_features", default=0)
    wide = (channels,) if channels > 1 or "num_input_channels" in vars(config) else ()
    made: Batch = {"past_values": torch.randn(SAMPLES, past, *wide, generator=generator)}
    for name, shape in {
        "future_values": (SAMPLES, future, *wide),
        "past_time_features": (SAMPLES, past, features),
        "future_time_features": (SAMPLES, future, features),
    }.items():
        if name in arguments:
            made[name] = torch.randn(shape, generator=generator)
    if "past_observed_mask" in arguments:
        made["past_observed_mask"] = torch.ones_like(made["past_values"])
    return made


def decided(config: Any, arguments: set[str], generator: torch.Generator) -> Batch:
    """Make a batch for decision transformers, which predict actions."""
    if "returns_to_go" not in arguments:
        return {}
    return {
        "states": torch.randn(SAMPLES, LENGTH, config.state_dim, generator=generator),
        "actions": torch.randn(SAMPLES, LENGTH, config.act_dim, generator=generator),
        "rewards": torch.randn(SAMPLES, LENGTH, 1, generator=generator),
        "returns_to_go": torch.randn(SAMPLES, LENGTH, 1, generator=generator),
        "timesteps": torch.arange(LENGTH).expand(SAMPLES, -1),
        "attention_mask": torch.ones(SAMPLES, LENGTH),
    }
