"""Bytes that depend on a program's symbols: expressions while it is compiled, code in the program, numbers
when it runs.

A symbol of a program's inputs is bound from its first line on. One that data decide (`nonzero`, `.item()`) is
bound in the middle: before that, its largest possible value stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.utils._sympy.functions import Max

from .events import Make

UNLIMITED = 2**48  # a symbol whose range ends above is taken to have none


def largest(sums: Iterable[Make], name: str) -> Make:
    """The largest of these, whatever the symbols are: what can never be the largest is left out."""
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
    """The largest value that a symbol can have, if that is known."""
    limits = shape_env.var_to_range.get(symbol)
    end = getattr(limits, "upper", None)
    try:
        return int(end) if end is not None and int(end) < UNLIMITED else None
    except (TypeError, ValueError, OverflowError, AttributeError):
        return None


def size_at_traced_shapes(size: Any, shape_env: Any, unknown: int) -> int:
    """Return a size for the shapes that were traced. Each symbol that data decide counts as `unknown`."""
    if not hasattr(shape_env, "optimization_hint"):  # torch 2.11
        found = shape_env.size_hint(size, allow_none=True)
        return int(unknown if found is None else found)
    return int(shape_env.optimization_hint(size, fallback=unknown))


def replace_unbound_symbols(live: Any, bound: Callable[[Any], bool], estimates: Mapping[Any, Any]) -> Any:
    """An expression of nothing but symbols that are bound: for the others, what they can be at most."""
    if isinstance(live, int):
        return live
    unbound = {symbol: estimates.get(symbol, 0) for symbol in live.free_symbols if not bound(symbol)}
    live = live.subs(unbound) if unbound else live
    return int(live) if live.is_number else live
