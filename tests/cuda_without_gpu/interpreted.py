"""Triton's interpreter for Triton's kernels, extended by the libdevice functions that it lacks.

With TRITON_INTERPRET=1, Inductor runs its kernels in the interpreter. The interpreter waits for the stream,
and copies the arguments of a kernel to RAM and back. So the numbers are right, but the host waits at each
kernel.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "abs": torch.abs,
    "acos": torch.acos,
    "acosh": torch.acosh,
    "asin": torch.asin,
    "asinh": torch.asinh,
    "atan": torch.atan,
    "atanh": torch.atanh,
    "ceil": torch.ceil,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "erfinv": torch.erfinv,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "floor": torch.floor,
    "lgamma": torch.lgamma,
    "log": torch.log,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "nearbyint": torch.round,
    "rint": torch.round,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "sinh": torch.sinh,
    "sqrt": torch.sqrt,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "trunc": torch.trunc,
}
TESTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "isinf": torch.isinf,
    "isnan": torch.isnan,
    "signbit": torch.signbit,
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "atan2": torch.atan2,
    "copysign": torch.copysign,
    "fmod": torch.fmod,
    "hypot": torch.hypot,
    "nextafter": torch.nextafter,
    "pow": torch.pow,
}


def install() -> None:
    _give_libdevice()
    _patch_once()
    _reduce_by_halves()


def _patch_once() -> None:
    """Patch each module of Triton's language only once.

    The interpreter would otherwise patch all of them at each function call inside a kernel, which takes
    milliseconds.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch, seen = interpreter._patch_lang, set[int]()

    def once(function: Any) -> Any:
        languages = {id(value) for value in function.__globals__.values() if inspect.ismodule(value)}
        if not languages <= seen:
            seen.update(languages)
            patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = once


def _reduce_by_halves() -> None:
    """Let a reduction combine all pairs of neighbours at once, again and again, instead of one element at a
    time.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")

    def reduce(self: Any, tensors: Any) -> list[Any]:
        original_axis = self.axis
        tensors, axis = self.unravel(tensors, self.axis)
        kinds, ndim = [tensor.dtype for tensor in tensors], len(tensors[0].handle.data.shape)
        parts = [np.moveaxis(tensor.handle.data, axis, 0) for tensor in tensors]
        while len(parts[0]) > 1:
            left = [self.to_tensor(part[0::2], kind) for part, kind in zip(parts, kinds)]
            right = [self.to_tensor(part[1::2], kind) for part, kind in zip(parts, kinds)]
            combined = self.combine_fn.fn(*left, *right)
            combined = combined if isinstance(combined, tuple) else (combined,)
            parts = [tensor.handle.data for tensor in combined]
        results = [part[0] for part in parts]
        if self.keep_dims:
            axes = (axis,) if original_axis is not None else tuple(range(ndim))
            results = [np.expand_dims(result, axes) for result in results]
        return [self.to_tensor(result, kind) for result, kind in zip(results, kinds)]

    interpreter.ReduceOps.generic_reduce = reduce


def _give_libdevice() -> None:
    """Replace the functions of libdevice by functions that the interpreter can run."""
    core = importlib.import_module("triton.language.core")
    handle_of = importlib.import_module("triton.runtime.interpreter").TensorHandle
    libdevice: Any = importlib.import_module("triton.language.extra.libdevice")

    def values(tensor: Any) -> torch.Tensor:
        return torch.from_numpy(tensor.handle.data)

    def made(result: torch.Tensor, kind: Any, shape: Any) -> Any:
        return core.tensor(handle_of(result.numpy(), kind.scalar), shape)

    def same_kind(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        def call(first: Any, *others: Any) -> Any:
            wide = [
                values(tensor).float() if tensor.dtype.is_bf16() else values(tensor)
                for tensor in (first, *others)
            ]
            # The operands may have different shapes. So the result may have another shape than the first
            # operand.
            result = function(*wide).to(values(first).dtype)
            shaped = core.block_type(first.type.scalar, list(result.shape)) if result.ndim else first.type
            return made(result, shaped, shaped)

        return call

    def test(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        def call(tensor: Any) -> Any:
            kind = tensor.type.with_element_ty(core.int32) if tensor.type.is_block() else core.int32
            return made(function(values(tensor)).to(torch.int32), kind, kind)

        return call

    for name, function in (UNARY | BINARY).items():
        setattr(libdevice, name, same_kind(function))
    for name, predicate in TESTS.items():
        setattr(libdevice, name, test(predicate))
