"""The build of teraio's wheels: compiles them, audits them, and tests them where no compiler exists.

In: this clone, g++, and a package index. Out: a folder of wheels, and rows of measurements as JSON.

    python packaging/build_wheels.py wheels                      shims, wheels and tests for this machine
    python packaging/build_wheels.py wheels --machine aarch64    a cross build, without the tests
    python packaging/build_wheels.py wheels --only test --test 3.11=2.13.0 --json rows.json

    shims     compiles `runtime/torch_extension` for each release of torch (shims.py)
    wheels    compiles `csrc` with zig against an old glibc, once per row of PYTHONS
    test      installs the wheels into clean environments (clean_environments.py), and runs
              check_installed.py there
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import clean_environments
import shims

ROOT = Path(__file__).resolve().parents[1]
# Version of Python to build with -> settings of scikit-build-core. The second wheel serves 3.12 and later.
PYTHONS: dict[str, tuple[str, ...]] = {"3.11": (), "3.12": ("wheel.py-api=cp312",)}
GLIBC = "2.28"  # the same as torch's wheels
# nanobind uses these headers. With the stable ABI, Python's own headers no longer include them.
INCLUDED = ("cerrno", "cstdio", "cstdlib", "cstring")
STEPS = ("shims", "wheels", "test")
ZIG_WRAPPER = """#!/bin/sh
exec {python} -m ziglang c++ -target {machine}-linux-gnu.{glibc} "$@"
"""


def build_wheels(out: Path, machine: str, work: Path, pythons: Sequence[str]) -> list[dict[str, Any]]:
    """Build a wheel per version of Python. Return one row of facts per wheel."""
    tools = _make_tools(out / "tools")
    compiler = work / "zig-c++"
    compiler.write_text(ZIG_WRAPPER.format(python=tools / "python", machine=machine, glibc=GLIBC))
    compiler.chmod(0o755)
    _run([str(tools / "python"), "-m", "build", "--sdist", "--outdir", str(work / "sdist"), str(ROOT)])
    (sdist,) = (work / "sdist").glob("*.tar.gz")
    rows = []
    for version in pythons:
        began = time.monotonic()
        plain = _compile_wheel(version, PYTHONS[version], sdist, compiler, machine, out, work)
        (out / "audited").mkdir(exist_ok=True)
        audited = _audit(tools, plain, out / "audited", machine)
        rows.append(
            {
                "wheel": audited.name,
                "python": version,
                "build_s": round(time.monotonic() - began, 1),
                "size_bytes": audited.stat().st_size,
                **count_contents(audited),
                "newest_glibc_symbol": newest_symbols(audited, tools),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _make_tools(folder: Path) -> Path:
    """Make an environment with the tools that build and audit wheels, unless it exists. Return the folder of
    its programs."""
    if (folder / "bin" / "auditwheel").exists():
        return folder / "bin"
    _run([sys.executable, "-m", "venv", str(folder)])
    requirements = ROOT / "packaging" / "requirements.txt"
    _run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "-r", str(requirements)])
    return folder / "bin"


def _compile_wheel(
    version: str, settings: tuple[str, ...], sdist: Path, compiler: Path, machine: str, out: Path, work: Path
) -> Path:
    """Compile the wheel from the sdist, in an environment that pip makes for this build."""
    target = work / f"plain-{version}"
    settings = (*settings, f"cmake.define.TERAIO_SHIMS={out / f'shims-{machine}'}")
    environ = {**os.environ, "CXX": str(compiler), "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    environ["CXXFLAGS"] = " ".join(f"-include {name}" for name in INCLUDED)
    command = [_python(version), "-m", "pip", "wheel"]
    if machine != platform.machine():
        # With `_PYTHON_HOST_PLATFORM`, pip would also install a cmake for that machine. So the tools of the
        # build come from an environment of this machine.
        programs = _make_native_tools(out / f"tools-{version}", version)
        command = [str(programs / "python"), "-m", "pip", "wheel", "--no-build-isolation"]
        environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
        settings = (
            *settings,
            "cmake.define.CMAKE_SYSTEM_NAME=Linux",
            f"cmake.define.CMAKE_SYSTEM_PROCESSOR={machine}",
        )
        environ["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
        tag = f"cpython-{version.replace('.', '')}"
        environ["SETUPTOOLS_EXT_SUFFIX"] = f".{tag}-{machine}-linux-gnu.so"
    command += ["--quiet", "--no-deps", "--wheel-dir", str(target)]
    for setting in settings:
        command += ["--config-settings", setting]
    _run([*command, str(sdist)], environ)
    (wheel,) = target.glob("*.whl")
    return wheel


def _make_native_tools(folder: Path, version: str) -> Path:
    """Make an environment with the tools that compile a wheel, unless it exists. Return the folder of its
    programs."""
    if not (folder / "bin" / "ninja").exists():
        _run([_python(version), "-m", "venv", str(folder)])
        install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        _run(
            [*install, "-c", str(ROOT / "constraints.txt"), "scikit-build-core", "nanobind", "cmake", "ninja"]
        )
    return folder / "bin"


def _python(version: str) -> str:
    """Return the path of this version of Python."""
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = sys.executable if version == running else clean_environments.find_python(version)
    if found is None:
        raise SystemExit(f"Python {version} is not installed: the wheel for Python {version} needs it")
    return found


def _audit(tools: Path, wheel: Path, out: Path, machine: str) -> Path:
    """Give the wheel the tag of the oldest system on which it can run. Return the new wheel's path.

    auditwheel refuses a wheel that needs libraries of this machine, or a newer glibc than torch's wheels.
    """
    before = {path.name for path in out.glob("*.whl")}
    environ = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    command = [str(tools / "auditwheel"), "repair", "--plat", "auto", "--wheel-dir", str(out)]
    # torch has these two libraries, and has loaded them before teraio loads a shim.
    command += ["--exclude", "libc10.so", "--exclude", "libtorch_cpu.so", str(wheel)]
    printed = _run(command, environ)
    added = [path for path in out.glob("*.whl") if path.name not in before]
    found = added or [path for path in out.glob("*.whl") if path.name in printed]
    if len(found) != 1 or f"_{machine}" not in found[0].name or "manylinux" not in found[0].name:
        raise SystemExit(
            f"auditwheel gave {[path.name for path in found]}, not one manylinux wheel:\n{printed}"
        )
    return found[0]


def count_contents(wheel: Path) -> dict[str, int]:
    """Count the wheel's files of teraio, and its prebuilt libraries. Refuse a wheel that lacks a file of
    this clone."""
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    here: set[str] = set()
    for folder, folders, names in os.walk(ROOT / "teraio", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        here |= {(Path(folder) / name).relative_to(ROOT).as_posix() for name in names}
    if missing := sorted(here - inside):
        raise SystemExit(f"{wheel.name} lacks {len(missing)} files, such as {', '.join(missing[:5])}")
    libraries = [name for name in inside if Path(name).parent.name == "shims" and name.endswith(".so")]
    return {"files": len(here), "prebuilt_libraries": len(libraries)}


def newest_symbols(wheel: Path, tools: Path) -> dict[str, str]:
    """Return the newest version of each group of symbols, such as GLIBC, that the wheel's libraries need."""
    code = (
        "import json, sys\n"
        "from elftools.elf.elffile import ELFFile\n"
        "for path in sys.argv[1:]:\n"
        "    section = ELFFile(open(path, 'rb')).get_section_by_name('.gnu.version_r')\n"
        "    for _, needed in section.iter_versions() if section else ():\n"
        "        for each in needed: print(each.name)\n"
    )
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(wheel) as archive:
        libraries = [member for member in archive.namelist() if member.endswith(".so")]
        archive.extractall(name, libraries)
        printed = _run([str(tools / "python"), "-c", code, *(str(Path(name) / each) for each in libraries)])
    newest: dict[str, str] = {}
    for line in printed.split():
        group, _, version = line.partition("_")
        newest[group] = max(newest.get(group, "0"), version, key=_as_numbers)
    return dict(sorted(newest.items()))


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _run(command: list[str], environ: dict[str, str] | None = None) -> str:
    ran = subprocess.run(command, check=False, capture_output=True, text=True, env=environ)
    if ran.returncode != 0:
        tail = (ran.stdout + ran.stderr)[-4000:]
        raise SystemExit(f"{' '.join(command[:4])} ... failed with exit code {ran.returncode}:\n{tail}")
    return ran.stdout + ran.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description="builds, audits and tests teraio's wheels")
    parser.add_argument("out", type=Path, help="the folder of the wheels")
    parser.add_argument("--machine", default=platform.machine(), choices=sorted(shims.COMPILERS))
    parser.add_argument("--only", nargs="+", default=STEPS, choices=STEPS)
    parser.add_argument("--python", nargs="+", default=list(PYTHONS), choices=list(PYTHONS))
    parser.add_argument("--torch", nargs="+", default=shims.RELEASES, help="releases to build shims for")
    parser.add_argument("--test", nargs="+", default=clean_environments.PAIRS, help="such as 3.11=2.13.0")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[dict[str, Any]]] = {"wheels": [], "tests": []}
    if "shims" in given.only:
        shutil.rmtree(out / f"shims-{given.machine}", ignore_errors=True)
        shims.build_shims(out / f"shims-{given.machine}", given.machine, tuple(given.torch))
    if "wheels" in given.only:
        with tempfile.TemporaryDirectory(prefix="teraio-wheels-") as name:
            rows["wheels"] = build_wheels(out, given.machine, Path(name), given.python)
    if "test" in given.only and given.machine == platform.machine():
        rows["tests"] = clean_environments.test_wheels(out / "audited", given.test)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    results = [row["passed"] for row in rows["tests"]]
    if False in results or (results and True not in results):
        raise SystemExit("a wheel failed its test, or no test ran")


if __name__ == "__main__":
    main()
