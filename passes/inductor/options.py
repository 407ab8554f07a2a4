"""Inductor's own settings: settings that the user gives to teraio, and settings that slots do not work with.

    options={"mode": "max-autotune-no-cudagraphs", "inductor": {"epilogue_fusion": False}}
      merge_checked_settings   options, checked against Inductor's own lists -> a patch of Inductor's config
      refuse_unfit_settings    raises for settings under which programs would have no slots or wrong slots,
                               from options, from torch._inductor.config or from the environment

Both functions run before the compile of a model begins. `refuse_unfit_settings` runs again before each graph
is compiled. Inductor compiles a backward later than its forward, and a setting may have changed in between.

A slot is a call of the engine that teraio inserts into a program before a kernel.
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

DEVICES = ("cpu", "cuda")  # for programs on these devices, Inductor uses our wrapper, which makes slots


@dataclass(frozen=True, slots=True)
class UnfitSetting:
    """A setting of Inductor that must be off, because slots (calls of the engine in a program) do not work
    with it.
    """

    name: str
    variable: str  # environment variable that turns the setting on; empty if there is none
    reason: str


UNFIT = (
    UnfitSetting(
        "cpp_wrapper",
        "TORCHINDUCTOR_CPP_WRAPPER",
        "its programs are entirely C++, without Python lines between which slots could be inserted",
    ),
    UnfitSetting(
        "fx_wrapper",
        "TORCHINDUCTOR_FX_WRAPPER",
        "its programs are FX graphs, without Python lines between which slots could be inserted",
    ),
    UnfitSetting(
        "triton.cudagraphs",
        "TORCHINDUCTOR_CUDAGRAPHS",
        "a recorded CUDA graph reads its tensors at the addresses of the recording, and a fetched tensor has "
        "another address. Mode 'max-autotune-no-cudagraphs' tunes without CUDA graphs",
    ),
    UnfitSetting(
        "memory_planning",
        "TORCHINDUCTOR_MEMORY_PLANNING",
        "the buffers of a program become parts of one pool, which is allocated at once without regard to the "
        "budget",
    ),
    UnfitSetting(
        "combo_kernels",
        "",
        "independent kernels are combined into one, which needs the tensors of all of them at once; slots in "
        "such programs are untested",
    ),
    UnfitSetting(
        "freezing",
        "TORCHINDUCTOR_FREEZING",
        "weights become constants of the program: copies that are never evicted and not counted",
    ),
    UnfitSetting(
        "nan_asserts",
        "TORCHINDUCTOR_NAN_ASSERTS",
        "it reads all arguments before the first slot and all results after the last; a read of an evicted "
        "tensor would end the process",
    ),
)


def merge_checked_settings(mode: str | None, inductor: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for Inductor's config: the settings of `mode`, overridden by the settings in
    `inductor`.

    Raise OptionError if a name or a type is wrong.
    """
    modes: dict[str, dict[str, Any]] = torch._inductor.list_mode_options()
    if mode and mode not in modes:
        raise OptionError(
            f"option 'mode': '{printable_line(mode)}' is not one of Inductor's modes ({', '.join(modes)})"
            f"{suggest_nearest_name(mode, list(modes))}"
        )
    wanted = dict(modes[mode]) if mode else {}
    known = config.get_config_copy()
    for name, value in inductor.items():
        key = name.replace("-", "_")  # torch.compile also accepts `-` for `_`
        if key not in known:
            raise OptionError(
                f"option 'inductor': '{printable_line(name)}' is not one of the {len(known)} settings "
                f"of Inductor in torch {torch.__version__} (torch._inductor.list_options() lists them)"
                f"{suggest_nearest_name(key, list(known))}"
            )
        wanted[key] = _check_setting_type(key, value, config.get_type(key))  # type: ignore[attr-defined]
    return wanted


def _check_setting_type(key: str, value: Any, expected: Any) -> Any:
    if not _fits_type(value, expected):
        default = config.get_config_copy()[key]
        raise OptionError(
            f"option 'inductor': '{key}' is {printable_line(repr(value))} ({type(value).__name__}); "
            f"Inductor takes {printable_line(_describe_type(expected))}, such as its current value "
            f"{printable_line(repr(default))}. Set a value other than bool, number or string in "
            f"torch._inductor.config.{key}"
        )
    return value


def _fits_type(value: Any, expected: Any) -> bool:
    """Return True if a scalar setting has the type that Inductor declares.

    Return False if the declared type is not scalar, for example a list or a function.
    """
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


def refuse_unfit_settings(wanted: Mapping[str, Any], mode: str | None = None) -> None:
    """Raise UnsupportedError if a setting is on that slots (teraio's calls in a program) do not work with.

    The error names the first such setting, its origin and a remedy.
    """
    known = config.get_config_copy()
    for unfit in UNFIT:
        if wanted.get(unfit.name, known.get(unfit.name)):
            raise UnsupportedError(
                f"Inductor's '{unfit.name}' is on, {_describe_origin_of_setting(unfit, wanted, mode)}, and "
                f"teraio does not work with it: {unfit.reason}. Turn it off, or compile without teraio"
            )
    _refuse_compiles_without_slots()


def _describe_origin_of_setting(unfit: UnfitSetting, wanted: Mapping[str, Any], mode: str | None) -> str:
    if unfit.name in wanted:
        by_mode = mode and torch._inductor.list_mode_options()[mode].get(unfit.name)
        return f"by option 'mode' ('{mode}')" if by_mode else "by option 'inductor'"
    if unfit.variable and os.environ.get(unfit.variable) == "1":
        return f"by {unfit.variable} in the environment"
    return f"by torch._inductor.config.{unfit.name}"


def _refuse_compiles_without_slots() -> None:
    """Raise UnsupportedError if programs would have no slots, for a reason that is not in UNFIT."""
    scheme = getattr(compile_fx, "fx_compile_mode", None)
    if scheme is not None and scheme.name != "NORMAL":
        raise UnsupportedError(
            f"TORCHINDUCTOR_FX_COMPILE_MODE makes Inductor compile in mode {scheme.name}, in another process "
            f"or from a copy of the graph, where teraio makes no slots. Unset it"
        )
    if V.aot_compilation:
        raise UnsupportedError(
            "teraio does not support ahead-of-time compilation (AOTInductor): its programs are C++ without "
            "slots. Compile with torch.compile, or with AOTInductor and without teraio"
        )
    partitions = getattr(utils, "_unstable_customized_partition_wrapper", None)
    if getattr(partitions, "wrapper", None) is not None:
        raise UnsupportedError(
            "a wrapper for the partitions of Inductor's programs is set "
            "(torch._inductor.utils.set_customized_partition_wrappers): each partition is a separate program "
            "without slots. Set it to None"
        )
    if getattr(torch._dynamo.config, "caching_precompile", False):
        raise UnsupportedError(
            "torch._dynamo.config.caching_precompile (TORCH_CACHING_PRECOMPILE) is on: it loads compiled "
            "programs without calling teraio, and they would run without a budget. Turn it off"
        )
    for device in DEVICES:
        codegen = common.device_codegens.get(device)
        if codegen is not None and codegen.wrapper_codegen is not wrapper.PythonWrapperCodegen:
            raise UnsupportedError(
                f"another library has set its own wrapper ({codegen.wrapper_codegen}) in Inductor for "
                f"{device}, and teraio makes its slots in a wrapper, too: a process can use only one wrapper"
            )
