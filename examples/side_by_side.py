"""Functions that the examples share: command-line flags, a block without teraio, and a table of figures."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import teraio


def arguments(doc: str, memory: str, steps: int, inner: str = "inductor") -> argparse.ArgumentParser:
    """Return a parser with the flags that all examples share. `doc` is the example's description."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default=memory, help=f"the budget, default {memory}")
    parser.add_argument("--steps", type=int, default=steps, help=f"default {steps}")
    parser.add_argument("--inner", default=inner, choices=("inductor", "eager"))
    return parser


def sizes(parser: argparse.ArgumentParser, **defaults: int) -> None:
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")


def model_folder(text: str) -> Path:
    """Return the folder of a model that is on this disk. The parser prints the reason if it is none."""
    folder = Path(text)
    missing = [name for name in ("config.json", "*.safetensors") if not any(folder.glob(name))]
    if missing:
        raise argparse.ArgumentTypeError(
            f"{text} has no {' and no '.join(missing)}; give the folder of a downloaded model, for example "
            "of `hf download OWNER/MODEL --local-dir FOLDER`"
        )
    return folder


def exit_for_import_error(error: ImportError, *packages: str) -> SystemExit:
    """Return an exit whose message names the missing package. If none of `packages` is missing, name the
    reason of the failed import.
    """
    if isinstance(error, ModuleNotFoundError) and error.name in packages:
        return SystemExit(f"{error.name} is missing: pip install {' '.join(packages)}")
    reason = " ".join(str(error).split())
    return SystemExit(
        f"an import of this example failed, {type(error).__name__}: {reason}. Other versions may do: "
        f"pip install --upgrade {' '.join(packages)}"
    )


@contextmanager
def without_teraio() -> Iterator[None]:
    """Turn teraio off for models that are compiled inside this block, so that they run without a budget."""
    os.environ["TERAIO_DISABLE"] = "1"
    try:
        yield
    finally:
        del os.environ["TERAIO_DISABLE"]
        torch._dynamo.reset()


def mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def size_bytes(model: torch.nn.Module) -> int:
    """Return the total bytes of the model's weights and buffers. Evicted tensors count too."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def equal(ours: object, plain: object) -> str:
    return "yes" if ours == plain else f"NO: {ours} and {plain}"


def table(stats: teraio.Stats | None = None, **rows: str) -> None:
    """Print the given rows, then figures of `stats`, or of `teraio.stats()` if `stats` is None.

    Each keyword is the name of a row: `plain_peak=...` prints the row `plain peak`.
    """
    stats = stats or teraio.stats()
    rows["peak of tensors"] = mib(stats["peak_bytes"] - stats["reserve_bytes"])
    rows["memory allowed"] = mib(stats["budget_bytes"])
    rows["written to disk"] = mib(stats["written_bytes"])
    rows["read from disk"] = mib(stats["read_bytes"])
    for name, value in rows.items():
        print(f"  {name.replace('_', ' '):<40} {value}")
