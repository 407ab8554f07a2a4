"""Sizes in bytes that depend on the symbols of a program.

During the compile, a size is an expression. The compiled program contains this expression as code, and
computes the number at run time. A symbol of an input's shape has a value from the program's first line on.
Other symbols depend on the values in a tensor (`nonzero`, `.item()`), and get their value in the middle of
the program. Before that line, an estimate replaces the symbol: its largest possible value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.utils._sympy.functions import Max

from .events import Make

UNLIMITED = 2**48  # if the upper limit of a symbol is at least this number, it counts as no limit


def largest(sums: Iterable[Make], name: str) -> Make:
    """Return the largest of the sums, as an expression that holds for all values of the symbols.

    The expression is the maximum of all sums, without the sums that are never the largest.
    """
    sums = list(sums)
    hint = max((made.size_bytes for made in sums), default=0)
    if all(made.size is None for made in sums):
        return Make(0, name, hint)
    kept: list[Any] = []
    for size in sorted({sympy.sympify(made.bytes_or_expression) for made in sums}, key=str):
        if not any(_is_never_larger(size, other) for other in kept):
            kept = [other for other in kept if not _is_never_larger(other, size)] + [size]
    return Make(0, name, hint, kept[0] if len(kept) == 1 else Max(*kept))


def total(parts: Iterable[Make], name: str) -> Make:
    parts = list(parts)
    symbolic = any(part.size is not None for part in parts)
    size_bytes = sum(part.size_bytes for part in parts)
    return Make(0, name, size_bytes, sum(part.bytes_or_expression for part in parts) if symbolic else None)


def _is_never_larger(one: Any, other: Any) -> bool:
    return bool((other - one).is_nonnegative)


def upper_limit_of_symbol(symbol: Any, shape_env: Any) -> int | None:
    """Return the largest value that a symbol can have, or None if no limit is known."""
    limits = shape_env.var_to_range.get(symbol)
    end = getattr(limits, "upper", None)
    try:
        return int(end) if end is not None and int(end) < UNLIMITED else None
    except (TypeError, ValueError, OverflowError, AttributeError):
        return None


def size_at_traced_shapes(size: Any, shape_env: Any, unknown: int) -> int:
    """Return the value of a size for the shapes with which the program was traced.

    Some symbols depend on the values in a tensor. Such a symbol has the value `unknown`.
    """
    if not hasattr(shape_env, "optimization_hint"):  # torch 2.11 has only `size_hint`
        found = shape_env.size_hint(size, allow_none=True)
        return int(unknown if found is None else found)
    return int(shape_env.optimization_hint(size, fallback=unknown))


def replace_unbound_symbols(live: Any, bound: Callable[[Any], bool], estimates: Mapping[Any, Any]) -> Any:
    """Replace each symbol that has no value yet by its estimate, or by 0 without an estimate."""
    if isinstance(live, int):
        return live
    unbound = {symbol: estimates.get(symbol, 0) for symbol in live.free_symbols if not bound(symbol)}
    live = live.subs(unbound) if unbound else live
    return int(live) if live.is_number else live
