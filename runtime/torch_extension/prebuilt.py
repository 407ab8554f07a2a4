"""The prebuilt libraries of a wheel. Each library was compiled from one source for one release of torch.

In: a source, and the installed torch. Out: a loaded library, or the reason why no prebuilt library is loaded.

The folder `shims` of a wheel has two files per library: the library, and a description in JSON. The
description names the torch release and its commit. It also has digests of the source, of the library, and of
the torch headers that the compiler read. The library is loaded only if all of them agree with the installed
torch and source.

The release and the headers determine the layout of torch's classes. torch's builds for CPUs and for CUDA have
the same headers, so one library serves both. The library calls no function of Python, so one library serves
all versions of Python.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.version import git_version

FOLDER = Path(__file__).with_name("shims")
Load = Callable[[str], ctypes.CDLL]


@dataclass(frozen=True, slots=True)
class Shim:
    """The description of a prebuilt library. The library's file has the same name, with the suffix .so."""

    source: str  # the stem of the source, such as `observer`
    release: str  # the torch release, without the part after `+`
    commit: str  # the commit of torch
    machine: str
    source_digest: str
    library_digest: str
    headers_digest: str
    headers: tuple[str, ...]  # paths below torch/include

    @property
    def identity(self) -> str:
        """Return the text that the library itself contains. The function `teraio_built_for` returns it."""
        return " ".join((self.source, self.release, self.commit, self.machine, self.headers_digest))

    @property
    def stem(self) -> str:
        return f"{self.source}-{self.release}-{self.machine}"

    def write(self, folder: Path) -> None:
        (folder / f"{self.stem}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Shim:
        """Read a description. Raise ValueError if the file is damaged."""
        try:
            fields = json.loads(path.read_text())
            fields["headers"] = tuple(fields["headers"])
            return cls(**fields)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path.name} is damaged ({error}): pip install --force-reinstall teraio"
            ) from error


def load(
    source: Path, folder: Path = FOLDER, load_library: Load = ctypes.CDLL
) -> tuple[ctypes.CDLL | None, str]:
    """Load the prebuilt library of this source for the installed torch. Return (library, ""), or (None,
    reason), as `find` does."""
    shim, reason = find(source, folder)
    if shim is None:
        return None, reason
    name = f"{shim.stem}.so"
    try:
        loaded = load_library(str(folder / name))
        loaded.teraio_built_for.restype = ctypes.c_char_p
        identity = loaded.teraio_built_for().decode()
    except (OSError, AttributeError) as error:
        return None, f"{name} cannot be loaded: {error}"
    if identity != shim.identity:
        return None, f"{name} was built for '{identity}', not for '{shim.identity}'"
    return loaded, ""


def find(source: Path, folder: Path = FOLDER) -> tuple[Shim | None, str]:
    """Find the prebuilt library of this source for the installed torch, without loading it.

    Return (description, ""), or (None, reason). The reason is "" if this teraio has no prebuilt libraries, as
    in a source checkout.
    """
    if not any(folder.glob("*.json")):
        return None, ""
    release, machine = torch.__version__.partition("+")[0], platform.machine()
    path = folder / f"{source.stem}-{release}-{machine}.json"
    if not path.exists():
        present = ", ".join(releases(source, folder)) or f"no torch on {machine}"
        return None, f"torch {torch.__version__} has no prebuilt {source.stem}: there is one for {present}"
    try:
        shim = Shim.read(path)
    except ValueError as error:
        return None, str(error)
    reason = _reason_to_refuse(shim, source, path.with_suffix(".so"))
    return (None, reason) if reason else (shim, "")


def releases(source: Path, folder: Path = FOLDER) -> list[str]:
    """Return the torch releases for which this machine has a prebuilt library of the source."""
    ending = f"-{platform.machine()}.json"
    found = (path.name for path in folder.glob(f"{source.stem}-*{ending}"))
    return sorted(name.removeprefix(f"{source.stem}-").removesuffix(ending) for name in found)


def _reason_to_refuse(shim: Shim, source: Path, library: Path) -> str:
    """Return the first difference between the description and the installed torch and source, or ""."""
    built_for = f"the prebuilt {shim.source} was built for torch {shim.release}"
    include = Path(torch.__file__).parent / "include"
    if shim.stem != library.stem:
        return f"{library.name} is described as {shim.stem}: pip install --force-reinstall teraio"
    if shim.commit != git_version:
        return f"{built_for} of commit {shim.commit[:12]}, and torch {torch.__version__} is of {git_version}"
    if torch.version.debug or not torch._C._GLIBCXX_USE_CXX11_ABI:
        return (
            f"{built_for} without debug checks and with C++11 strings, and torch {torch.__version__} is not"
        )
    for names, folder, digest, difference in (
        (parts_of(source), source.parent, shim.source_digest, f"{source.name} or its headers were changed"),
        ([library.name], library.parent, shim.library_digest, f"{library.name} is damaged"),
        (shim.headers, include, shim.headers_digest, "the headers in torch/include are not the same"),
    ):
        try:
            if digest_of(names, folder) != digest:
                return f"{built_for}, and {difference}"
        except OSError as error:
            return f"{built_for}, and {error.filename}: {error.strerror}"
    return ""


def parts_of(source: Path) -> list[str]:
    """Return the file names of the source and of its headers. Each header's name begins with the source's."""
    return [source.name, *sorted(path.name for path in source.parent.glob(f"{source.stem}_*.h"))]


def digest_of(names: Iterable[str], folder: Path) -> str:
    """Return a digest of the names and bytes of these files. Raise OSError if a file is missing."""
    digest = hashlib.sha256()
    for name in names:
        content = (folder / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
