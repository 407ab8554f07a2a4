"""The identity a plan is valid for, and plans kept from run to run.

A cache is a private folder of plan files, one per key: `$TERAIO_CACHE_DIR`, or `teraio` in the user's cache
directory; `TERAIO_CACHE_DIR=off` turns it off. Files are written whole or not at all, so that any number of
processes may use it at once; the last writer of a key wins. What others could have written is not read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from teraio.errors import FileFormatError
from teraio.formats.plan import Plan
from teraio.formats.profile import Profile
from teraio.units import printable_line

SUFFIX = ".plan.json.gz"
ENTRIES_MAX = 512  # the least recently used go; a plan of a 70B step packs to 130 KB, so 64 MB at most


def fingerprint_of_profile(profile: Profile) -> str:
    """Hash of everything a plan refers to: the kernels in order, the tensors with their sizes and uses.

    Times are left out: a plan for the same step on another day is still a plan for this step.
    """
    digest = hashlib.sha256(b"teraio-plan-1")
    for kernel in profile.kernels:
        digest.update(f"{kernel.call} {kernel.name}\n".encode())
    for t in profile.tensors:
        digest.update(f"{t.name} {t.kind} {t.size_bytes} {t.persistent} {t.reads} {t.writes}\n".encode())
    return digest.hexdigest()[:32]


def cache_key_of(fingerprint: str, *also: str) -> str:
    """The name of an entry: the step, and what else a plan depends on."""
    return hashlib.sha256("\0".join((fingerprint, *also)).encode()).hexdigest()[:32]


def find_cache_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where plans are kept; None if that is turned off."""
    environ = os.environ if environ is None else environ
    asked = environ.get("TERAIO_CACHE_DIR", "").strip()
    if asked.lower() in ("off", "0", "none"):
        return None
    if asked:
        return Path(os.path.expanduser(asked)) / "plans"
    home = os.path.expanduser(environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache")
    return None if home.startswith("~") else Path(home) / "teraio" / "plans"  # a user without a home


def compiled_extension_folder() -> Path | None:
    """Where the little that is compiled for the torch that is here stays, whether plans are kept or not."""
    plans = find_cache_folder() or find_cache_folder({**os.environ, "TERAIO_CACHE_DIR": ""})
    return None if plans is None else plans.with_name("built")


@dataclass(frozen=True, slots=True)
class CachedPlan:
    path: Path
    size_bytes: int
    used_at_s: int


class PlanCache:
    """A folder of plans. Nothing in it is believed: a plan is read as strictly as any file, must be for the
    step that asks, and costs time at worst."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read_plan(self, key: str, fingerprint: str | None) -> tuple[Plan | None, str]:
        """The plan of a key, or why what is there was refused (empty if there is nothing). Without a
        `fingerprint` it may be of any step."""
        path = self.folder / f"{key}{SUFFIX}"
        if refused := reason_to_distrust(self.folder) or reason_to_distrust(path):
            return None, refused
        if not path.exists():
            return None, ""
        try:
            plan = Plan.read(path)
        except FileFormatError as error:
            return None, str(error)
        if fingerprint is not None and plan.fingerprint != fingerprint:
            return None, f"{path} is a plan for another step (fingerprint {printable_line(plan.fingerprint)})"
        with contextlib.suppress(OSError):
            os.utime(path)
        return plan, ""

    def write_plan(self, key: str, plan: Plan) -> str:
        """Write a plan. Out: why it could not be, or nothing."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if refused := reason_to_distrust(self.folder):
                return refused
            path = self.folder / f"{key}{SUFFIX}"
            if path.is_symlink():  # else what it points to would be written
                path.unlink(missing_ok=True)
            plan.write(path)
            path.chmod(0o600)
        except (OSError, FileFormatError) as error:
            return str(error)
        for old in self.entries()[ENTRIES_MAX:]:
            old.path.unlink(missing_ok=True)
        return ""

    def entries(self) -> list[CachedPlan]:
        """What is there, the most recently used first."""
        found = []
        for path in sorted(self.folder.glob(f"*{SUFFIX}")) if os.path.isdir(self.folder) else ():
            with contextlib.suppress(OSError):  # another process has removed it
                status = path.lstat()
                found.append(CachedPlan(path, status.st_size, int(status.st_mtime)))
        return sorted(found, key=lambda entry: -entry.used_at_s)

    def clear(self) -> list[CachedPlan]:
        """Remove all plans; what else is in the folder stays."""
        gone = self.entries()
        for entry in gone:
            entry.path.unlink(missing_ok=True)
        return gone


def reason_to_distrust(path: Path) -> str:
    """Why this file or folder may be somebody else's doing; nothing if it is ours, or is not there."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return f"{path} is neither a file nor a folder"
    if status.st_uid != os.geteuid():
        return f"{path} belongs to another user (uid {status.st_uid})"
    # A folder of ours keeps the group out; a file has the user's umask for the moment it takes to write it.
    if status.st_mode & (0o022 if stat.S_ISDIR(status.st_mode) else 0o002):
        return f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o}); chmod go-w it"
    return ""
