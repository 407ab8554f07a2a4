"""The identity a plan is valid for."""

from __future__ import annotations

import hashlib

from teraio.profile import Profile


def fingerprint_of(profile: Profile) -> str:
    """Hash of everything a plan refers to: the kernels in order, the tensors with their sizes and uses.

    Times are left out: a plan for the same step on another day is still a plan for this step.
    """
    digest = hashlib.sha256(b"teraio-plan-1")
    for kernel in profile.kernels:
        digest.update(f"{kernel.call} {kernel.name}\n".encode())
    for t in profile.tensors:
        digest.update(f"{t.name} {t.kind} {t.size_bytes} {t.persistent} {t.reads} {t.writes}\n".encode())
    return digest.hexdigest()[:32]
