"""Small image models of timm, which are drawn by a seed and trained by SGD with momentum."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from strangers.case import Case, Compile, UnusableError

CLASSES = 8
BATCH = 3
STEPS = 3
SIZES = (64, 96, 112)
PARAMETERS_MAX = 30_000_000
LARGE = re.compile(
    r"large|huge|giant|gigantic|enormous|xlarge|so\d+m|_\d+b_|_xl|_xxl|_l\d?_|_[lgh]$|_3[2-9]0|_[4-9]\d\d$|_m_|_l$"
)


def names(seed: int) -> list[str]:
    import timm

    found: list[str] = sorted(name for name in timm.list_models() if not LARGE.search(name))
    random.Random(seed).shuffle(found)
    return found


def made(name: str, settings: dict[str, Any]) -> nn.Module:
    import timm

    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, num_classes=CLASSES, pretrained=False, **settings)
    return model


def too_large(name: str) -> bool:
    """Return True if the model has too many parameters. Return False if this is unknown, because the model
    cannot be built on the meta device.
    """
    try:
        with torch.device("meta"):
            model = made(name, {})
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return False
    return sum(parameter.numel() for parameter in model.parameters()) > PARAMETERS_MAX


def fitted(name: str) -> tuple[dict[str, Any], int]:
    """Return a pair: the settings of the smallest version that can be built and run, and the side length of
    this version's images.
    """
    if too_large(name):
        raise UnusableError("too many parameters")
    faults = []
    for settings in (*({"img_size": size} for size in SIZES), {}):
        try:
            model = made(name, settings)
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            faults.append(str(error))
            continue
        if sum(parameter.numel() for parameter in model.parameters()) > PARAMETERS_MAX:
            raise UnusableError("too many parameters")
        own = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))[-1]
        for side in settings.values() or (*SIZES, own):
            try:
                with torch.no_grad():
                    model(torch.randn(BATCH, 3, side, side))
                return settings, side
            except (ValueError, AssertionError, RuntimeError, IndexError, ZeroDivisionError) as error:
                faults.append(str(error))
    raise UnusableError(f"it cannot be built or fed: {faults[-1][:300]}")


def train(name: str, compiled: Compile) -> Iterator[Any]:
    settings, side = fitted(name)
    model = compiled(made(name, settings).train())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    for _ in range(STEPS):
        images = torch.randn(BATCH, 3, side, side, generator=generator)
        labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        output = model(images)
        first = output[0] if isinstance(output, tuple | list) else output
        loss = functional.cross_entropy(first.flatten(1), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
    yield model
    yield optimizer


def case(name: str) -> Case:
    return Case(name, partial(train, name))
