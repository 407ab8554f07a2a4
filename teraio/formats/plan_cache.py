"""The fingerprint of a step, which a plan names, and the cache of plans for later runs.

The cache is a private folder with one plan file per key. The folder is `plans` in `$TERAIO_CACHE_DIR`, or
`teraio/plans` in the user's cache directory. `TERAIO_CACHE_DIR=off` turns the cache off. Files are written
atomically, so several processes may use the cache at the same time. If two processes write the same key, the
later plan replaces the earlier plan. The cache refuses to read a file that another user could have written.
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
# Most plans in the cache. They take at most 64 MB, because a plan for a 70B model takes 130 KB. The least
# recently used plans are deleted.
ENTRIES_MAX = 512


def fingerprint_of_profile(profile: Profile) -> str:
    """Hash everything that a plan refers to: the kernels in order, and the tensors with their sizes and uses.

    The hash excludes durations. So a plan is still valid if the kernels take longer in a later run.
    """
    digest = hashlib.sha256(b"teraio-plan-1")
    for kernel in profile.kernels:
        digest.update(f"{kernel.call} {kernel.name}\n".encode())
    for t in profile.tensors:
        born = "" if t.born is None else f" {t.born}"
        digest.update(f"{t.name} {t.kind} {t.size_bytes} {t.persistent} {t.reads} {t.writes}".encode())
        digest.update(f"{born}\n".encode())
    return digest.hexdigest()[:32]


def cache_key_of(fingerprint: str, *dependencies: str) -> str:
    """Return the name of a cache entry: a hash of the fingerprint and of everything else that the plan
    depends on.
    """
    return hashlib.sha256("\0".join((fingerprint, *dependencies)).encode()).hexdigest()[:32]


def find_cache_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder of cached plans. Return None if the cache is off, or if the user has no home
    directory.
    """
    environ = os.environ if environ is None else environ
    folder = environ.get("TERAIO_CACHE_DIR", "").strip()
    if folder.lower() in ("off", "0", "none"):
        return None
    if folder:
        return Path(os.path.expanduser(folder)) / "plans"
    home = os.path.expanduser(environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache")
    # If the user has no home directory, `expanduser` leaves the `~` unchanged.
    return None if home.startswith("~") else Path(home) / "teraio" / "plans"


def compiled_extension_folder() -> Path | None:
    """Return the folder for C++ code that is compiled against the installed torch.

    Return this folder also if the plan cache is off. Return None if the user has no home directory.
    """
    plans = find_cache_folder() or find_cache_folder({**os.environ, "TERAIO_CACHE_DIR": ""})
    return None if plans is None else plans.with_name("built")


@dataclass(frozen=True, slots=True)
class CachedPlan:
    path: Path
    size_bytes: int
    used_at_s: int


class PlanCache:
    """A folder of cached plans, which may contain invalid files.

    The reader checks a cached plan as strictly as any other file. Its fingerprint must be the fingerprint of
    the current step. So a bad plan can make training slower, but not wrong.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read_plan(self, key: str, fingerprint: str | None) -> tuple[Plan | None, str]:
        """Return (plan, "") for a key. If there is no usable plan, return (None, reason).

        The reason is "" if no file has this key. Otherwise it explains why the file is refused. If
        `fingerprint` is None, accept a plan for any step.
        """
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
        """Write a plan. Return "", or the reason why the plan could not be written."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if refused := reason_to_distrust(self.folder):
                return refused
            path = self.folder / f"{key}{SUFFIX}"
            # Remove a link first, because the write would change the file to which the link points.
            if path.is_symlink():
                path.unlink(missing_ok=True)
            plan.write(path)
            path.chmod(0o600)
        except (OSError, FileFormatError) as error:
            return str(error)
        for old in self.entries()[ENTRIES_MAX:]:
            old.path.unlink(missing_ok=True)
        return ""

    def entries(self) -> list[CachedPlan]:
        """Return the cached plans. The most recently used plan comes first."""
        found = []
        for path in sorted(self.folder.glob(f"*{SUFFIX}")) if os.path.isdir(self.folder) else ():
            with contextlib.suppress(OSError):  # another process may have removed the file
                status = path.lstat()
                found.append(CachedPlan(path, status.st_size, int(status.st_mtime)))
        return sorted(found, key=lambda entry: -entry.used_at_s)

    def clear(self) -> list[CachedPlan]:
        """Remove all cached plans and return them. Keep all other files in the folder."""
        removed = self.entries()
        for entry in removed:
            entry.path.unlink(missing_ok=True)
        return removed


def reason_to_distrust(path: Path) -> str:
    """Explain how another user could have written this file or folder. Return "" if none could, or if it does
    not exist.
    """
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
    # The group must not be allowed to write to the folder. A file may be writable for the group, because a
    # new file has the permissions of the user's umask until `chmod` runs.
    if status.st_mode & (0o022 if stat.S_ISDIR(status.st_mode) else 0o002):
        return f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o}); chmod go-w it"
    return ""
