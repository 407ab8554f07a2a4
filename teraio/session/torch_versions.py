"""The check of torch's version. Untested versions must pass a self-test.

Slots (the calls of the engine between kernels) depend on private parts of torch, which may change with each
version. For an untested version, this module logs a warning once, and compiles a small graph as a self-test
(passes/selftest.py). If the self-test fails with `inductor`, the run uses `eager`. If it fails with `eager`,
too, an error refuses this version of torch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from teraio.errors import UnsupportedError

log = logging.getLogger("teraio")

# The training tests were run with these versions, on the CPU, with both inner programs. pyproject.toml allows
# only these versions.
TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")

SelfTest = Callable[[str, str], str]  # function of (inner program, device) that returns the failure, or ""
VERDICTS: dict[tuple[str, str, str], str] = {}  # (torch version, inner program, device) -> the failure, or ""
WARNED: set[str] = set()  # warnings of this process; each is logged only once


def is_tested(version: str) -> bool:
    """Return True for a release of a tested version, such as `2.13.0+cpu` or `2.13.1`.

    Return False for alphas, release candidates and builds from source.
    """
    release = re.fullmatch(r"(\d+\.\d+)\.\d+(\+(cpu|cu\d+|rocm[\d.]+|xpu))?", version)
    return release is not None and release[1] in TESTED


def choose_inner_program(
    inner: str, version: str, device: str, self_test: SelfTest, on_fallback: str = "warn"
) -> str:
    """Return the inner program to use: `inner`, or `eager` if the self-test of `inner` fails with this
    version of torch.

    Raise UnsupportedError if no inner program works.
    """
    if is_tested(version):
        return inner
    _warn_once(
        f"teraio was not tested with torch {version} (tested are {', '.join(TESTED)}): a self-test runs on a "
        f"small graph first"
    )
    failed = {inner: _self_test_once(inner, version, device, self_test)}
    if failed[inner] and inner != "eager" and on_fallback != "error":
        failed["eager"] = _self_test_once("eager", version, device, self_test)
    if not failed[inner]:
        return inner
    if not failed.get("eager", "not tested"):
        _warn_once(
            f"torch {version}: teraio's slots fail in inner={inner!r} ({failed[inner]}), so inner='eager' is "
            "used: nothing is fused, steps take longer, more memory is needed. Install torch "
            f"{_tested_range()} for "
            f"{inner}"
        )
        return "eager"
    failures = "; ".join(f"inner={name!r}: {why}" for name, why in failed.items())
    other = ", or inner='eager'" if len(failed) == 1 and inner != "eager" else ""
    raise UnsupportedError(
        f"teraio cannot work with torch {version}: the self-test of its slots fails in {failures}. Install "
        f"torch {_tested_range()}{other}"
    )


def _self_test_once(inner: str, version: str, device: str, self_test: SelfTest) -> str:
    key = version, inner, device
    if key not in VERDICTS:
        VERDICTS[key] = self_test(inner, device)
    return VERDICTS[key]


def _warn_once(text: str) -> None:
    if text not in WARNED:
        WARNED.add(text)
        log.warning("teraio: %s", text)


def _tested_range() -> str:
    return f"{TESTED[0]} to {TESTED[-1]}"
