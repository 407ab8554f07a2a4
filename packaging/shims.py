"""The prebuilt libraries of a wheel ("shims"): one per C++ source and torch release.

In: the sources in `runtime/torch_extension`, and torch's wheels, which pip downloads one by one. Out: a
folder with a library and a description per source and release. `runtime/torch_extension/prebuilt.py` reads
this folder.

    python packaging/shims.py FOLDER [--machine aarch64] [--torch 2.13.0 ...]
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

from teraio.runtime.torch_extension import build
from teraio.runtime.torch_extension.prebuilt import Shim, digest_of, parts_of

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "runtime" / "torch_extension"
# Every release of the supported series (teraio/session/torch_versions.py) that has a wheel for Linux.
RELEASES = ("2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0")
# Each source, and the libraries of torch that the source needs.
LIBRARIES = {"observer": ("c10", "torch_cpu"), "allocator": ("c10",)}
COMPILERS = {"x86_64": "g++", "aarch64": "aarch64-linux-gnu-g++"}
# The wheels of torch have this tag. A wheel of torch for one version of Python has the headers for all.
TAGS = ("--only-binary=:all:", "--python-version=3.11", "--implementation=cp", "--abi=cp311")


def build_shims(folder: Path, machine: str, releases: tuple[str, ...] = RELEASES) -> list[Shim]:
    """Build the libraries for each release. Keep one wheel of torch at a time on the disk."""
    if machine not in COMPILERS:
        raise SystemExit(f"no compiler is known for {machine}: choose one of {', '.join(COMPILERS)}")
    folder.mkdir(parents=True, exist_ok=True)
    built = []
    for release in releases:
        with tempfile.TemporaryDirectory(prefix="teraio-torch-") as name:
            torch = _unpack_torch(release, machine, Path(name))
            for source in LIBRARIES:
                built.append(_build_shim(source, torch, release, machine, folder))
                print(
                    f"{built[-1].stem}: {(folder / f'{built[-1].stem}.so').stat().st_size} bytes", flush=True
                )
    return built


def _unpack_torch(release: str, machine: str, folder: Path) -> Path:
    """Download a wheel of torch. Unpack its headers and the two libraries that shims are linked against."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", *TAGS]
    command += [f"--platform=manylinux_2_28_{machine}", "--dest", str(folder), f"torch=={release}"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    if ran.returncode != 0:
        raise SystemExit(f"torch {release} for {machine} cannot be downloaded: {ran.stderr.strip()}")
    (wheel,) = folder.glob("*.whl")
    needed = re.compile(r"torch/(include/.*|version\.py|lib/lib(c10|torch_cpu)\.so)")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if needed.fullmatch(name)])
    wheel.unlink()
    return folder / "torch"


def _build_shim(source: str, torch: Path, release: str, machine: str, folder: Path) -> Shim:
    """Compile the source twice: first to list and digest the headers, then with this digest inside."""
    include = torch / "include"
    headers = _headers_of(source, include, machine)
    commit = re.search(r"git_version = '(\w+)'", (torch / "version.py").read_text())
    assert commit is not None
    shim = Shim(
        source=source,
        release=release,
        commit=commit[1],
        machine=machine,
        source_digest=digest_of(parts_of(SOURCES / f"{source}.cpp"), SOURCES),
        library_digest="",
        headers_digest=digest_of(headers, include),
        headers=headers,
    )
    library = folder / f"{shim.stem}.so"
    linked = [f"-l{name}" for name in LIBRARIES[source]]
    # No symbol may be missing in torch's libraries, and no folder of this machine may be in the library.
    linker = ["-s", "-Wl,-z,defs", "-Wl,--allow-shlib-undefined", "-Wl,--build-id=none"]
    command = [*_compiler(machine, include), *linker, f"-L{torch / 'lib'}"]
    command += [f'-DTERAIO_BUILT_FOR="{shim.identity}"', f"-ffile-prefix-map={torch}=torch"]
    command += [f"-ffile-prefix-map={ROOT}=teraio", str(SOURCES / f"{source}.cpp")]
    command += [str(ROOT / "packaging" / "portable.cpp"), *linked, "-o", str(library)]
    _run(command)
    shim = replace(shim, library_digest=digest_of([library.name], folder))
    shim.write(folder)
    return shim


def _headers_of(source: str, include: Path, machine: str) -> tuple[str, ...]:
    """Return the headers of torch that the compiler reads for this source."""
    rule = _run([*_compiler(machine, include), "-M", str(SOURCES / f"{source}.cpp")])
    read = {Path(word) for word in rule.replace("\\\n", " ").split()}
    return tuple(sorted(str(path.relative_to(include)) for path in read if path.is_relative_to(include)))


def _compiler(machine: str, include: Path) -> list[str]:
    """Return the compiler and its flags, which are the flags of a build on the user's machine, and a header
    that makes the library portable."""
    portable = str(ROOT / "packaging" / "portable.h")
    return [
        COMPILERS[machine],
        *build.FLAGS,
        "-D_GLIBCXX_USE_CXX11_ABI=1",
        "-include",
        portable,
        f"-I{include}",
    ]


def _run(command: list[str]) -> str:
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    if ran.returncode != 0:
        raise SystemExit(f"{command[0]} failed with exit code {ran.returncode}:\n{ran.stderr[-4000:]}")
    return ran.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="builds the prebuilt libraries of a wheel")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machine", default=platform.machine(), choices=sorted(COMPILERS))
    parser.add_argument("--torch", nargs="+", default=RELEASES)
    given = parser.parse_args()
    build_shims(given.folder, given.machine, tuple(given.torch))


if __name__ == "__main__":
    main()
