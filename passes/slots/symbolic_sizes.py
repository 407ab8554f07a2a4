"""Sizes in bytes that depend on the symbols of a program.

A size is an expression during the compile, code in the program, and a number at run time. Symbols of inputs
are bound from the first line on. A symbol whose value depends on the values in a tensor (`nonzero`,
`.item()`) is bound in the middle of the program. Before that position, the symbol's largest possible value
replaces the symbol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.utils._sympy.functions import Max

from .events import Make

UNLIMITED = 2**48  # an upper limit above this counts as no limit


def largest(sums: Iterable[Make], name: str) -> Make:
    """Return the maximum of the sums, as an expression that is valid for all values of the symbols.

    The expression leaves out sums that are never the largest.
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
    """Return the value of a size at the traced shapes.

    A symbol whose value depends on the values in a tensor counts as `unknown`.
    """
    if not hasattr(shape_env, "optimization_hint"):  # torch 2.11 has only size_hint
        found = shape_env.size_hint(size, allow_none=True)
        return int(unknown if found is None else found)
    return int(shape_env.optimization_hint(size, fallback=unknown))


def replace_unbound_symbols(live: Any, bound: Callable[[Any], bool], estimates: Mapping[Any, Any]) -> Any:
    """Replace unbound symbols by their estimates, so that the expression has only bound symbols."""
    if isinstance(live, int):
        return live
    unbound = {symbol: estimates.get(symbol, 0) for symbol in live.free_symbols if not bound(symbol)}
    live = live.subs(unbound) if unbound else live
    return int(live) if live.is_number else live
