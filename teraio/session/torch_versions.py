"""Which torch this is: one that the tests ran with, or one that must show first that slots work on it.

Slots are written into programs through parts of torch that promise nothing from one version to the next. So a
version that was not tested is warned of once and given a graph of a few kernels (passes/selftest.py). An
inner program that fails there is not used: Inductor's falls back to `eager`, and `eager` to a refusal.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from teraio.errors import UnsupportedError

log = logging.getLogger("teraio")

# The training tests ran with these, on CPU, on both inner programs. pyproject.toml allows the same.
TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")

SelfTest = Callable[[str, str], str]  # (inner, device) -> what failed, or nothing
VERDICTS: dict[tuple[str, str, str], str] = {}  # (torch, inner, device) -> the same
SAID: set[str] = set()  # warnings given, each once per process


def is_tested(version: str) -> bool:
    """A release of a tested series: `2.13.0+cpu`, `2.13.1`, and no alpha, release candidate or build from
    source."""
    release = re.fullmatch(r"(\d+\.\d+)\.\d+(\+(cpu|cu\d+|rocm[\d.]+|xpu))?", version)
    return release is not None and release[1] in TESTED


def choose_inner_program(
    inner: str, version: str, device: str, self_test: SelfTest, on_fallback: str = "warn"
) -> str:
    """The inner program to use with this torch, for a model on this kind of device."""
    if is_tested(version):
        return inner
    _warn_once(
        f"teraio was not tested with torch {version} (but with {', '.join(TESTED)}): it is tried on a small "
        f"graph first"
    )
    failed = {inner: _self_test_once(inner, version, device, self_test)}
    if failed[inner] and inner != "eager" and on_fallback != "error":
        failed["eager"] = _self_test_once("eager", version, device, self_test)
    if not failed[inner]:
        return inner
    if not failed.get("eager", "not asked"):
        _warn_once(
            f"torch {version}: teraio's slots fail in inner={inner!r} ({failed[inner]}), so inner='eager' is "
            "used: nothing is fused, steps take longer, more memory is needed. Install torch "
            f"{_tested_range()} for "
            f"{inner}"
        )
        return "eager"
    told = "; ".join(f"inner={name!r}: {why}" for name, why in failed.items())
    other = ", or inner='eager'" if len(failed) == 1 and inner != "eager" else ""
    raise UnsupportedError(
        f"teraio cannot work with torch {version}: the self-test of its slots fails in {told}. Install torch "
        f"{_tested_range()}{other}"
    )


def _self_test_once(inner: str, version: str, device: str, self_test: SelfTest) -> str:
    key = version, inner, device
    if key not in VERDICTS:
        VERDICTS[key] = self_test(inner, device)
    return VERDICTS[key]


def _warn_once(text: str) -> None:
    if text not in SAID:
        SAID.add(text)
        log.warning("teraio: %s", text)


def _tested_range() -> str:
    return f"{TESTED[0]} to {TESTED[-1]}"
