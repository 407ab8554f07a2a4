"""The lines of a long proof, `name value target PASS|FAIL`, which run.py reads.

Each tells whether its target was met.
"""

from __future__ import annotations


def at_least(name: str, value: float, target: float) -> bool:
    return _line(name, value, f">={target:g}", value >= target)


def at_most(name: str, value: float, target: float) -> bool:
    return _line(name, value, f"<={target:g}", value <= target)


def exactly(name: str, value: float, target: float = 0) -> bool:
    return _line(name, value, f"{target:g}", value == target)


def as_it_is(name: str, value: float) -> bool:
    return _line(name, value, "any", True)


def _line(name: str, value: float, target: str, passed: bool) -> bool:
    shown = f"{value:.10g}"  # whole numbers whole
    print(f"{name} {shown} {target} {'PASS' if passed else 'FAIL'}", flush=True)
    return passed
