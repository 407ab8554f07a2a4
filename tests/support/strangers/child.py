"""One case of a family of strangers, trained in its own process.

    child.py FAMILY NAME MODE eager|inductor      runs the case, prints one JSON object
    child.py FAMILY list [SEED]                   prints the names of the family's cases
    child.py FAMILY listen                        forks for each case that it reads from stdin

MODE is `budget`, `plain` (the same program under TERAIO_DISABLE=1) or `uncompiled`. The listening process has
imported slow modules and compiled a small model, and its forks inherit both. A case that crashes ends only
its own fork.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import json
import logging
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from nursery import Small
from torch import nn

from strangers.case import Case, Compile, UnusableError

ENVIRONMENT = {
    "TERAIO_CACHE_DIR": "off",
    "TERAIO_PLANNER": "greedy",
    "TERAIO_PLANNING": os.environ.get("TERAIO_PLANNING", "inline"),
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
SUMMARY = (
    "budget_bytes",
    "misses",
    "overrun_bytes",
    "peak_bytes",
    "read_bytes",
    "step",
    "user_code_bytes",
    "written_bytes",
)


def complete_torchvision() -> None:
    """Define two operators of torchvision, if torchvision's own library does not load together with a torch
    without CUDA.

    Without these operators, every import of torchvision would fail, also an import by another module.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        kept.append(library)
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except ImportError:
        pass


# The library is kept alive, because torch removes a library's operators when the library is freed.
kept: list[torch.library.Library] = []


def family_of(name: str) -> Any:
    complete_torchvision()
    return importlib.import_module(f"strangers.{name}")


def names(family: Any, seed: int) -> list[str]:
    """Return the names of all cases, in a random order that the seed decides.

    The module of a large family has functions `names` and `case`, so that single cases can be built. Other
    families have `cases`.
    """
    if hasattr(family, "names"):
        return list(family.names(seed))
    found = sorted(family.cases())
    random.Random(seed).shuffle(found)
    return found


def case_of(family: Any, name: str) -> Case:
    case: Case = family.case(name) if hasattr(family, "case") else family.cases()[name]
    return case


class Warned(logging.Handler):
    """A handler that keeps the lines that teraio logs at WARNING or above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


# ---- compared results


def parts(thing: Any) -> Iterator[torch.Tensor | str]:
    """Yield the tensors in a value, and all other content of the value as text."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, nn.Module):
        for name, tensor in (*thing.named_parameters(), *thing.named_buffers()):
            yield name
            yield tensor
    elif isinstance(thing, torch.optim.Optimizer):
        for group in thing.param_groups:
            yield from parts({key: value for key, value in group.items() if key != "params"})
            for parameter in group["params"]:
                yield from parts(thing.state.get(parameter, {}))
    elif isinstance(thing, Mapping):
        for key in sorted(thing, key=str):
            yield str(key)
            yield from parts(thing[key])
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from parts(each)
    elif isinstance(thing, float):
        yield thing.hex()
    else:
        yield repr(thing) if isinstance(thing, int | str | None) else type(thing).__name__


def digest_into(digest: Any, thing: Any) -> None:
    """Update the digest with all bits of a value, also the bits of NaN."""
    for part in parts(thing):
        if isinstance(part, str):
            digest.update(part.encode())
            continue
        own = part.detach().clone(memory_format=torch.contiguous_format).cpu()
        digest.update(f"{own.dtype} {tuple(own.shape)}".encode())
        if own.numel() and own.layout == torch.strided:
            digest.update(own.reshape(-1).view(torch.uint8).numpy().tobytes())


def compiler(mode: str, inner: str) -> Compile:
    if mode == "uncompiled":
        return lambda module, **_: module

    def compile_in_place(module: nn.Module, **more: Any) -> nn.Module:
        module.compile(
            backend="teraio",
            options={"memory": "min", "warmup": 1, "inner": inner},
            **more,
        )
        return module

    return compile_in_place


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it, because Dynamo wraps errors that a backend raises."""
    seen: set[int] = set()
    following: list[BaseException | None] = [error]
    while following:
        each = following.pop(0)
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            following += [getattr(each, "inner_exception", None), each.__cause__, each.__context__]


def run(case: Case, mode: str, inner: str) -> dict[str, Any]:
    os.environ.update(ENVIRONMENT)
    if mode != "budget":
        os.environ["TERAIO_DISABLE"] = "1"
    import teraio
    from teraio.errors import TeraioError

    torch.set_num_threads(1)
    torch.manual_seed(2611)
    warned = Warned()
    logging.getLogger("teraio").addHandler(warned)
    losses: list[float] = []
    result: dict[str, Any] = {"state": "done", "error": "", "reason": case.reason, "losses": losses}
    digest = hashlib.sha256()
    try:
        things: Iterable[Any] = case.run(compiler(mode, inner))
        for thing in things:
            if isinstance(thing, float):
                losses.append(thing)
            # The counts are taken before the digest is computed, because the digest's reads would change the
            # counts.
            if isinstance(thing, nn.Module | torch.optim.Optimizer):
                result["stats"] = result.get("stats") or dict(teraio.stats())
            digest_into(digest, thing)
        result["digest"] = digest.hexdigest()
    except Exception as error:  # noqa: BLE001 - whatever a stranger's code raises is a finding
        refusal = next((each for each in chain(error) if isinstance(each, TeraioError)), None)
        unusable = isinstance(error, UnusableError)
        result["state"] = "unusable" if unusable else "refused" if refusal else "raised"
        result["error"] = f"{type(refusal or error).__name__}: {refusal or error}"[:2000]
        traceback.print_exc()
    stats = result.get("stats") or dict(teraio.stats())
    result["stats"] = {key: stats[key] for key in SUMMARY if key in stats}
    result["warned"] = warned.lines
    return result


# ---- the listening process


def attend(case: Case, request: dict[str, Any], out: Path, folder: str) -> None:
    """Run one case in this process, and write its output to the request's files."""
    with open(request["log"], "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable(all_threads=True)
    faulthandler.dump_traceback_later(request["limit_s"], exit=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    out.write_text(json.dumps(run(case, request["mode"], request["inner"])))


def warm() -> None:
    """Compile a small model without an engine. The forks inherit the loaded compiler, and each fork makes an
    engine of its own before its first program.
    """
    os.environ.update(ENVIRONMENT)
    os.environ["TERAIO_DISABLE"] = "1"
    for more in ({}, {"dynamic": True}):
        model = compiler("plain", "eager")(Small(), **more)
        model(torch.randint(0, 8, (2, 5))).backward()
    del os.environ["TERAIO_DISABLE"]
    torch._dynamo.reset()


def listen(family: Any) -> None:
    """Run each request from stdin in a fork. When the fork has ended, print its result, if any, and its exit
    code.
    """
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryDirectory(prefix="teraio-strangers-") as folder:
            out = Path(folder, "result.json")
            child = os.fork()
            if not child:
                code = 1
                try:
                    attend(case_of(family, request["name"]), request, out, str(Path(folder, "inductor")))
                    code = 0
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            result = json.loads(out.read_text()) if out.exists() else {}
        print(json.dumps({**result, "exit": code}), flush=True)


def main() -> None:
    faulthandler.enable()
    family = family_of(sys.argv[1])
    match sys.argv[2:]:
        case ["list", *seed]:
            print(json.dumps(names(family, int(seed[0]) if seed else 0)))
        case ["listen"]:
            warm()
            listen(family)
        case [name, "plain" | "budget" | "uncompiled" as mode, "eager" | "inductor" as inner]:
            print(json.dumps(run(case_of(family, name), mode, inner)))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
