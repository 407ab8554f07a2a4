"""Functions that print the output lines of a long proof, `name value target PASS|FAIL`. run.py reads these
lines.

Each function returns True if the exact value meets its target. Only the printed value is rounded.
"""

from __future__ import annotations


def at_least(name: str, value: float, target: float) -> bool:
    return _line(name, value, f">={_shown(target)}", value >= target)


def at_most(name: str, value: float, target: float) -> bool:
    return _line(name, value, f"<={_shown(target)}", value <= target)


def exactly(name: str, value: float, target: float = 0) -> bool:
    return _line(name, value, _shown(target), value == target)


def as_it_is(name: str, value: float) -> bool:
    return _line(name, value, "any", True)


def _line(name: str, value: float, target: str, passed: bool) -> bool:
    print(f"{name} {_shown(value)} {target} {'PASS' if passed else 'FAIL'}", flush=True)
    return passed


def _shown(value: float) -> str:
    return f"{round(value, 3):.10g}"
