"""Model classes of transformers at toy size, trained with AdamW. A seed draws them from all classes in
transformers' own mappings.

Configurations and batches are made from the names of fields and arguments. A class for which this does not
work is unusable.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from strangers.case import Case, Compile, UnusableError
from strangers.feeding import SAMPLES, Maker, makers
from strangers.toy_configurations import WAYS, shrunk

STEPS = 5
PARAMETERS_MAX = 8_000_000
PARAMETERS_LEAST = 20_000
# These mappings contain models without a head, which have no loss.
WITHOUT_LOSS = {"MODEL_FOR_BACKBONE", "MODEL_FOR_IMAGE", "MODEL_FOR_TEXT_ENCODING"}


def names(seed: int) -> list[str]:
    import transformers.models.auto.modeling_auto as auto

    found: set[str] = set()
    for mapping, entries in vars(auto).items():
        kind = mapping.removesuffix("_MAPPING_NAMES")
        if kind == mapping or not kind.startswith("MODEL_FOR_") or kind in WITHOUT_LOSS:
            continue
        for entry in entries.values():
            found.update((entry,) if isinstance(entry, str) else entry)
    drawn = sorted(found)
    random.Random(seed).shuffle(drawn)
    return drawn


def class_of(name: str) -> Any:
    import transformers

    try:
        return getattr(transformers, name)
    except (AttributeError, ImportError) as error:
        raise UnusableError(f"{name} cannot be imported: {str(error)[:200]}") from error


def configured(model_class: Any, way: str) -> Any:
    config_class = model_class.config_class
    config = config_class(**shrunk(config_class(), way))
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name in ("use_mamba_kernels", "use_cache"):
            if getattr(part, name, None):
                setattr(part, name, False)
        if part is not None and getattr(part, "pad_token_id", 0) is None:
            part.pad_token_id = 0
    return config


def made(model_class: Any, way: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = model_class(configured(model_class, way))
    return model.train()


def size(model_class: Any, way: str) -> int:
    """Return the number of parameters of the class at this toy size."""
    config = configured(model_class, way)
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model_class(config).parameters())


def floating(output: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors in an output that require gradients."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point() and output.requires_grad:
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from floating(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from floating(value)


def loss_of(output: Any) -> torch.Tensor:
    """Return the model's own loss. If the model has no loss, return the sum of the mean squares of its
    outputs.
    """
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss if loss.dim() == 0 else loss.mean()
    squares = [tensor.float().square().mean() for tensor in floating(output)]
    if not squares:
        raise UnusableError("no output has a gradient")
    return torch.stack(squares).sum()


def fed(model: nn.Module, name: str) -> Maker:
    """Try all kinds of batches for the model. Return the function that makes the first kind with which the
    model's forward and backward run.
    """
    faults: list[str] = []

    def first(image_tokens: int, *, text_only: bool = False) -> Maker | None:
        for make in makers(model, name, image_tokens, text_only=text_only):
            try:
                torch.manual_seed(3)
                loss_of(model(**make(torch.Generator().manual_seed(1)))).backward()
            except Exception as error:  # noqa: BLE001 - a batch that does not suit may raise anything
                faults.append(f"{type(error).__name__}: {error}"[:300])
            else:
                return make
        return None

    found = first(0)
    counts = re.search(r"tokens: (\d+)\D+features:? (\d+)", " ".join(faults))
    if found is None and counts:  # the error named the number of image tokens, so try again with this number
        found = first(int(counts[2]) // SAMPLES)
    found = found or first(0, text_only=True)
    if found is None:
        raise UnusableError(f"no batch is accepted: {' | '.join(dict.fromkeys(faults))[:800]}")
    return found


def fitted(name: str) -> tuple[Any, str, Maker]:
    """Return three results: (1) the class, (2) the first way of making the class toy-sized that works, and
    (3) the function that makes batches for the class.
    """
    model_class = class_of(name)
    faults: list[str] = []
    for way in WAYS:
        try:
            parameters = size(model_class, way)
            if not PARAMETERS_LEAST < parameters < PARAMETERS_MAX:
                faults.append(f"{way}: {parameters} parameters")
                continue
            model = made(model_class, way)
            return model_class, way, fed(model, name)
        except Exception as error:  # noqa: BLE001 - sizes that do not suit each other may raise anything
            faults.append(f"{way}: {type(error).__name__}: {error}"[:500])
    raise UnusableError("; ".join(faults))


def train(name: str, compiled: Compile) -> Iterator[Any]:
    model_class, way, make = fitted(name)
    dynamic = {"dynamic": True} if zlib.crc32(name.encode()) % 3 == 0 else {}
    model = compiled(made(model_class, way), **dynamic)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    for _ in range(STEPS):
        loss = loss_of(model(**make(generator)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
    yield model
    yield optimizer


def case(name: str) -> Case:
    return Case(name, partial(train, name))
