"""Inductor's own settings: those that the user asks for through us, and those that slots cannot live with.

    options={"mode": "max-autotune-no-cudagraphs", "inductor": {"epilogue_fusion": False}}
      settings       checked against Inductor's own lists -> what its compile is patched with
      refuse_unfit   of those, and of what is set anyway, what would leave programs without slots or make
                     them wrong: from options, from torch._inductor.config, from the environment

Both are done before anything is compiled, and the second once more at each graph: the backward is compiled at
its first run, and a setting may have changed since.
"""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import compile_fx, config, utils
from torch._inductor.codegen import common, wrapper
from torch._inductor.virtualized import V

from teraio.errors import OptionError, UnsupportedError
from teraio.formats.fields import suggest_nearest_name
from teraio.units import printable_line

DEVICES = ("cpu", "cuda")  # whose programs get slots


@dataclass(frozen=True, slots=True)
class UnfitSetting:
    """A switch of Inductor's that must be off."""

    name: str
    variable: str  # of the environment, that turns it on; empty if there is none
    reason: str


UNFIT = (
    UnfitSetting(
        "cpp_wrapper",
        "TORCHINDUCTOR_CPP_WRAPPER",
        "its programs are C++ throughout, with no line of Python at which a slot could stand",
    ),
    UnfitSetting(
        "fx_wrapper",
        "TORCHINDUCTOR_FX_WRAPPER",
        "its programs are FX graphs, with no line of Python at which a slot could stand",
    ),
    UnfitSetting(
        "triton.cudagraphs",
        "TORCHINDUCTOR_CUDAGRAPHS",
        "a recorded CUDA graph finds its tensors at the addresses of the recording, and a tensor that comes "
        "back has another one. Mode 'max-autotune-no-cudagraphs' tunes without them",
    ),
    UnfitSetting(
        "memory_planning",
        "TORCHINDUCTOR_MEMORY_PLANNING",
        "the buffers of a program become parts of one pool, which is taken at once whatever the budget",
    ),
    UnfitSetting(
        "combo_kernels",
        "",
        "kernels that have nothing to do with each other become one, which needs the tensors of all of them "
        "at once, and slots in such programs were not tested",
    ),
    UnfitSetting(
        "freezing",
        "TORCHINDUCTOR_FREEZING",
        "weights become constants inside the program: copies that no slot sees, never moved and not counted",
    ),
    UnfitSetting(
        "nan_asserts",
        "TORCHINDUCTOR_NAN_ASSERTS",
        "it reads all arguments before the first slot and all results after the last, also those that are "
        "away, which would end the process",
    ),
)


def merge_checked_settings(mode: str | None, inductor: Mapping[str, Any]) -> dict[str, Any]:
    """What Inductor's compile is patched with: the mode's settings, and over them those asked for by name."""
    modes: dict[str, dict[str, Any]] = torch._inductor.list_mode_options()
    if mode and mode not in modes:
        raise OptionError(
            f"option 'mode': '{printable_line(mode)}' is not one of Inductor's modes ({', '.join(modes)})"
            f"{suggest_nearest_name(mode, list(modes))}"
        )
    asked = dict(modes[mode]) if mode else {}
    known = config.get_config_copy()
    for name, value in inductor.items():
        key = name.replace("-", "_")  # as torch.compile spells them, too
        if key not in known:
            raise OptionError(
                f"option 'inductor': '{printable_line(name)}' is not one of the {len(known)} settings "
                "of Inductor in "
                f"torch {torch.__version__}, which torch._inductor.list_options() lists"
                f"{suggest_nearest_name(key, list(known))}"
            )
        asked[key] = _check_setting_type(key, value, config.get_type(key))  # type: ignore[attr-defined]
    return asked


def _check_setting_type(key: str, value: Any, expected: Any) -> Any:
    if not _fits_type(value, expected):
        default = config.get_config_copy()[key]
        raise OptionError(
            f"option 'inductor': '{key}' is {printable_line(repr(value))} ({type(value).__name__}); "
            "Inductor takes "
            f"{printable_line(_describe_type(expected))}, such as its {printable_line(repr(default))} "
            "of now. What is no bool, "
            f"number or string is set in torch._inductor.config.{key}"
        )
    return value


def _fits_type(value: Any, expected: Any) -> bool:
    """Whether a scalar is of the type that Inductor declares: what is no type to check against (lists,
    functions, passes) takes no scalar."""
    origin = typing.get_origin(expected)
    if origin is typing.Literal:
        return any(value == word and type(value) is type(word) for word in typing.get_args(expected))
    if origin in (typing.Union, types.UnionType):
        return any(_fits_type(value, choice) for choice in typing.get_args(expected))
    if expected is bool or isinstance(value, bool):
        return expected is bool and isinstance(value, bool)
    if expected is float:
        return isinstance(value, int | float)
    return isinstance(expected, type) and isinstance(value, expected)


def _describe_type(expected: Any) -> str:
    if typing.get_origin(expected) is typing.Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(expected)))
    if expected is type(None):
        return "no value of these types"
    return expected.__name__ if isinstance(expected, type) else str(expected)


def refuse_unfit_settings(asked: Mapping[str, Any], mode: str | None = None) -> None:
    """UnsupportedError names the first thing that slots cannot live with, where it was set, and what to
    do."""
    known = config.get_config_copy()
    for unfit in UNFIT:
        if asked.get(unfit.name, known.get(unfit.name)):
            raise UnsupportedError(
                f"Inductor's '{unfit.name}' is on, {_describe_origin_of_setting(unfit, asked, mode)}, and "
                "teraio cannot work with "
                f"it: {unfit.reason}. Turn it off, or compile without teraio"
            )
    _refuse_compiles_without_slots()


def _describe_origin_of_setting(unfit: UnfitSetting, asked: Mapping[str, Any], mode: str | None) -> str:
    if unfit.name in asked:
        by_mode = mode and torch._inductor.list_mode_options()[mode].get(unfit.name)
        return f"by option 'mode' ('{mode}')" if by_mode else "by option 'inductor'"
    if unfit.variable and os.environ.get(unfit.variable) == "1":
        return f"by {unfit.variable} in the environment"
    return f"by torch._inductor.config.{unfit.name}"


def _refuse_compiles_without_slots() -> None:
    """Ways of compiling that are no settings: each of them goes past the pass that makes slots."""
    scheme = getattr(compile_fx, "fx_compile_mode", None)
    if scheme is not None and scheme.name != "NORMAL":
        raise UnsupportedError(
            f"TORCHINDUCTOR_FX_COMPILE_MODE asks Inductor to compile in mode {scheme.name}, outside of this "
            f"process or through a copy, where teraio's slots are not made. Unset it"
        )
    if V.aot_compilation:
        raise UnsupportedError(
            "teraio is no backend for ahead-of-time compilation (AOTInductor): its programs are C++ without "
            "slots. Compile with torch.compile, or with AOTInductor and without teraio"
        )
    partitions = getattr(utils, "_unstable_customized_partition_wrapper", None)
    if getattr(partitions, "wrapper", None) is not None:
        raise UnsupportedError(
            "a wrapper for the partitions of Inductor's programs is set "
            "(torch._inductor.utils.set_customized_partition_wrappers): a partition is a program of its own "
            "that has no slots. Set it to None"
        )
    if getattr(torch._dynamo.config, "caching_precompile", False):
        raise UnsupportedError(
            "torch._dynamo.config.caching_precompile (TORCH_CACHING_PRECOMPILE) is on: it brings compiled "
            "programs back without asking teraio, without a budget. Turn it off"
        )
    for device in DEVICES:
        codegen = common.device_codegens.get(device)
        if codegen is not None and codegen.wrapper_codegen is not wrapper.PythonWrapperCodegen:
            raise UnsupportedError(
                f"another library has put its own wrapper ({codegen.wrapper_codegen}) into Inductor for "
                f"{device}, and teraio's slots are made by a wrapper, too: a process can use only one of them"
            )
