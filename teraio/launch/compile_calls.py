"""The script's own calls of `torch.compile`: a call for Inductor gets the backend `teraio` instead.

    torch.compile(f)                                  backend "teraio"
    torch.compile(f, mode=..., options={...})         the same, with Inductor's mode and settings
    torch.compile(f, backend="eager"|"aot_eager")     backend "teraio" with inner="eager"
    torch.compile(f, backend=<any other>)             unchanged

CUDA graphs, and other settings that teraio's programs do not work with, are left out. A log line says so.
Calls from torch's own modules are unchanged, because torch compiles parts of its own operators.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch

from teraio.launch import run_lines
from teraio.launch.trained_models import MODELS
from teraio.options import Settings

# Modes of Inductor with CUDA graphs, and the mode that takes their place.
WITHOUT_GRAPHS = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
EAGER = ("eager", "aot_eager")
OWN_TO_TORCH_COMPILE = ("guard_filter_fn", "use_aoti")  # keys of `options` that torch.compile itself takes


def wrap_compile() -> None:
    """Wrap `torch.compile`. `torch.nn.Module.compile` calls it, too."""
    original = torch.compile

    @functools.wraps(original)
    def compile_by_teraio(model: Any = None, **given: Any) -> Any:
        owner = sys._getframe(1).f_globals.get("__name__", "")
        module = _module_of(model)
        if given.get("disable") or (owner.partition(".")[0] == "torch" and module is None):
            return original(model, **given)
        if model is None:
            return functools.partial(compile_by_teraio, **given)
        if module is not None:
            MODELS.leave_to_script(module)
        return original(model, **_arguments_for_teraio(_name_of(model if module is None else module), given))

    torch.compile = compile_by_teraio
    MODELS.compile_with(original)


def _module_of(model: Any) -> torch.nn.Module | None:
    """Return the module that a call compiles, or whose method it compiles. Return None for a function."""
    module = model if isinstance(model, torch.nn.Module) else getattr(model, "__self__", None)
    return module if isinstance(module, torch.nn.Module) else None


def _name_of(what: Any) -> str:
    if isinstance(what, torch.nn.Module):
        return type(what).__name__
    return str(getattr(what, "__name__", type(what).__name__))


def _arguments_for_teraio(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of torch.compile, with the backend `teraio` where that is possible."""
    backend = given.get("backend")
    if backend == "teraio" or _is_our_function(backend):
        return dict(given)
    eager = backend in EAGER if isinstance(backend, str) else False
    options = dict(given.get("options") or {})
    if (backend not in (None, "inductor") and not eager) or options.get("use_aoti"):
        run_lines.say_left_alone(name, backend)
        return dict(given)
    kept = {key: options.pop(key) for key in OWN_TO_TORCH_COMPILE if key in options}
    inner: dict[str, Any] = {"inner": "eager"} if eager else {}
    if not eager and Settings.parse().inner != "eager":
        inner = _inductor_options(name, given.get("mode"), options)
    run_lines.say_script_compiles(name)
    rest = {key: value for key, value in given.items() if key not in ("backend", "mode", "options")}
    return {**rest, "backend": "teraio", "options": {**inner, **kept} or None}


def _is_our_function(backend: object) -> bool:
    ours = sys.modules.get("teraio.backend")
    return ours is not None and backend is ours.backend


def _inductor_options(name: str, mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return teraio's options for Inductor's mode and settings, without those that teraio refuses."""
    left_out = []
    if mode in WITHOUT_GRAPHS:
        left_out.append(f"CUDA graphs of mode '{mode}'")
        mode = WITHOUT_GRAPHS[mode]
    if options:
        from teraio.passes.inductor.options import UNFIT

        unfit = {setting.name for setting in UNFIT}
        for key in [key for key in options if key.replace("-", "_") in unfit and options[key]]:
            left_out.append(f"setting '{key}'")
            del options[key]
    if left_out:
        run_lines.say_left_out(name, left_out)
    found: dict[str, Any] = {} if mode in (None, "default") else {"mode": mode}
    return {**found, "inductor": options} if options else found
