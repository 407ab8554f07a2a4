"""Functions of lists of tensors, such as `_foreach_add_`. teraio calls such a function for one element of the
lists at a time.

All gradients of a list together may not fit in memory. The result is the same, because these functions treat
each element independently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

# More functions that take lists of tensors and treat each element independently. Their names do not begin
# with `_foreach_`.
OTHERS = frozenset({"_amp_foreach_non_finite_check_and_unscale_"})


def is_elementwise_list_function(name: str) -> bool:
    """Return whether the function with this name takes lists and treats each element independently."""
    return name.startswith("_foreach_") or name in OTHERS


def count_elements(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the length of the lists in this call. Return 0 if the function cannot be called for one element
    at a time."""
    if not is_elementwise_list_function(name):
        return 0
    return next((len(v) for v in (*args, *kwargs.values()) if isinstance(v, list | tuple)), 0)


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return all tensors in `values`, also those in nested lists and tuples."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, list | tuple):
            found += tensors_in(value)
        elif isinstance(value, torch.Tensor):
            found.append(value)
    return found


def call_for_each_element(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], elements: int
) -> Any:
    """Call the function for one element of the lists at a time. Return the results as one list."""

    def part(value: Any, at: int) -> Any:
        return [value[at]] if isinstance(value, list | tuple) and len(value) == elements else value

    results: list[Any] = []
    for at in range(elements):
        named = {name: part(value, at) for name, value in kwargs.items()}
        result = func(*[part(value, at) for value in args], **named)
        results += result if isinstance(result, list | tuple) else ()
    return results if results else None
