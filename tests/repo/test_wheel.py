"""Tests of sdist and wheel: the sdist has each file only once, and every module of the wheel can be imported.

Compiling the native library takes most of the time. A plain run therefore copies the library of the editable
install.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tree

from teraio import _native
from teraio.formats import shipped_files
from teraio.report import html_page
from teraio.runtime.torch_extension import observer
from teraio.session import torch_versions

MODULES = sorted(tree.package())

# A program that imports modules from the wheel's folder, and prints the file of each module.
IMPORT_ALL = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    print(importlib.import_module(name).__file__)
"""


@dataclass(frozen=True, slots=True)
class Built:
    sdist_names: tuple[str, ...]
    wheel: Path
    wheel_names: tuple[str, ...]


def build(source: Path, target: Path, setting: str) -> None:
    """Build an sdist from the source, and a wheel from that sdist. The build downloads nothing."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), "-C", setting]
    ran = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]


def fresh(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run an interpreter in which an installed teraio has no effect.

    The flag -S leaves out the folders of installed packages, and so does not run the import hook of an
    editable teraio. PYTHONPATH then adds the folders without the hook. The interpreter therefore finds torch,
    and imports the teraio that the arguments choose.
    """
    installed = os.pathsep.join(path for path in sys.path if path.endswith("-packages"))
    return subprocess.run(
        [sys.executable, "-S", "-P", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": installed},
        capture_output=True,
        text=True,
        check=False,
    )


SETTINGS = ["wheel.cmake=false", pytest.param("cmake.build-type=Debug", marks=pytest.mark.long)]


@pytest.fixture(scope="module", params=SETTINGS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """Build the packages from a copy of the files that git lists.

    The packages may neither need nor contain any other file.
    """
    folder = tmp_path_factory.mktemp("wheel")
    for path in tree.listed():
        target = folder / "source" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree.ROOT / path, target, follow_symlinks=False)
    build(folder / "source", folder / "dist", request.param)
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    with tarfile.open(sdist) as archive:
        sdist_names = tuple(
            member.name.partition("/")[2] for member in archive.getmembers() if not member.isdir()
        )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
        compiled = Path(_native.__file__)
        if request.param != SETTINGS[0]:
            assert f"teraio/{compiled.name}" in archive.namelist()
        else:
            shutil.copy2(compiled, folder / "unpacked" / "teraio")
        yield Built(sdist_names, folder / "unpacked", tuple(archive.namelist()))


def test_the_wheel_has_every_module(built: Built) -> None:
    assert {name.split(".")[1] for name in MODULES if "." in name} >= {"passes", "runtime"}
    files = {
        name.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".") for name in built.wheel_names
    }
    assert set(MODULES) - files == set()
    # Two kinds of files are not modules: the assets of a report's page, and sources that are compiled at run
    # time.
    assets = {
        f"teraio/report/assets/{name}"
        for name in ("page.html", "page.css", "notebook.css", *html_page.SCRIPTS)
    }
    compiled = tree.files(".cpp", ".h")
    assets |= {f"teraio/{path}" for path in compiled if path.parts[0] == "runtime"}
    along = {f"teraio/{path}" for path in tree.files(".json", ".gz") if path.parts[0] == "profiles"}
    assert len(along) == len(shipped_files.ABOUT_PROFILES) + len(shipped_files.ABOUT_MACHINES)
    assert (assets | along) - set(built.wheel_names) == set()
    assert along - set(built.sdist_names) == set()


def test_wheel_finds_shipped_files_by_name(built: Built, tmp_path: Path) -> None:
    words = ["profile", "show", "gpt2-b16"], ["machine", "list"], ["profile", "list"]
    lines = [f"assert cli.main({each}) == 0" for each in words]
    code = "\n".join(
        (f"import sys; sys.path.insert(0, {str(built.wheel)!r}); from teraio.cli import main as cli", *lines)
    )
    ran = fresh(["-c", code], tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "448 kernels" in ran.stdout and "rtx4090-1ssd" in ran.stdout and "vit-b-16-b256" in ran.stdout
    assert not any(tmp_path.iterdir())


def test_every_module_of_the_wheel_imports(built: Built) -> None:
    """Import every module in a new interpreter, and check that each module's file is in the wheel."""
    names = [name for name in (*MODULES, "teraio._native") if not name.endswith("__main__")]
    ran = fresh(["-c", IMPORT_ALL, str(built.wheel), *names], built.wheel.parent)
    assert ran.returncode == 0, ran.stderr
    places = ran.stdout.splitlines()
    assert len(places) == len(names)
    assert all(Path(place).is_relative_to(built.wheel) for place in places), places


def test_the_sdist_has_one_copy_of_each_file(built: Built) -> None:
    names = built.sdist_names
    assert len(names) == len(set(names))
    code = sorted(name for name in names if name.endswith(".py") and not name.startswith("tests/"))
    assert sorted(tree.module_name(Path(name)) for name in code) == MODULES
    assert {"LICENSE", "README.md", "pyproject.toml", "csrc/CMakeLists.txt"} <= set(names)


def test_wheel_metadata_is_complete(built: Built) -> None:
    (folder,) = built.wheel.glob("teraio-*.dist-info")
    assert (folder / "licenses" / "LICENSE").read_text() == (tree.ROOT / "LICENSE").read_text()
    assert "[torch_dynamo_backends]\nteraio=teraio.backend:backend" in (
        folder / "entry_points.txt"
    ).read_text().replace(" = ", "=")
    metadata = (folder / "METADATA").read_text()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Dist: torch<2.16,>=2.11" in metadata.replace("torch>=2.11,<2.16", "torch<2.16,>=2.11")


def test_wheel_contains_no_other_files(built: Built) -> None:
    tops = {name.split("/")[0] for name in built.wheel_names}
    assert all(top == "teraio" or top.endswith(".dist-info") for top in tops), tops


def test_wheels_get_a_prebuilt_library_per_source_and_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tree.ROOT / "packaging"))
    shims: Any = importlib.import_module("shims")
    assert {release.rpartition(".")[0] for release in shims.RELEASES} == set(torch_versions.TESTED)
    assert {path.stem for path in shims.SOURCES.glob("*.cpp")} == set(shims.LIBRARIES)
    assert shims.LIBRARIES["observer"] == observer.LIBRARIES


def test_clean_environments_cover_each_series_and_both_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tree.ROOT / "packaging"))
    wheels: Any = importlib.import_module("build_wheels")
    pairs = [pair.split("=") for pair in wheels.clean_environments.PAIRS]
    assert {release.rpartition(".")[0] for _, release in pairs} == set(torch_versions.TESTED)
    assert {python for python, _ in pairs} >= set(wheels.PYTHONS)


def test_wheel_without_a_file_of_the_clone_is_refused(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tree.ROOT / "packaging"))
    wheels: Any = importlib.import_module("build_wheels")
    path = tmp_path / "teraio.whl"
    left_out = "teraio/launch/bootstrap/sitecustomize.py"
    with zipfile.ZipFile(path, "w") as archive:
        for name in {*built.wheel_names, f"teraio/{Path(_native.__file__).name}"} - {left_out}:
            archive.writestr(name, "")
    with pytest.raises(SystemExit, match=rf"teraio\.whl lacks 1 files, such as {left_out}"):
        wheels.count_contents(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(left_out, "")
        archive.writestr("teraio/runtime/torch_extension/shims/observer-2.13.0-x86_64.so", "")
    counts = wheels.count_contents(path)
    assert counts["prebuilt_libraries"] == 1 and counts["files"] > len(MODULES)


@pytest.mark.parametrize(
    ("written", "passed"),
    [
        ("The user requested (constraint) torch<=2.14.1\nERROR: ResolutionImpossible: for help", None),
        ("ERROR: No matching distribution found for torch==2.99.0", None),
        ("ERROR: the connection is broken", False),
    ],
)
def test_release_that_pip_cannot_find_is_a_row_without_a_verdict(
    written: str, passed: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tree.ROOT / "packaging"))
    environments: Any = importlib.import_module("clean_environments")

    def fail_to_install(command: list[str], environ: dict[str, str] | None = None) -> str:
        if "install" in command:
            raise RuntimeError(written)
        return ""

    monkeypatch.setattr(environments, "_run", fail_to_install)
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    (row,) = environments.test_wheels(Path("wheels"), [f"{running}=2.99.0"])
    assert row["passed"] is passed
    assert written.splitlines()[0] in row["failure" if passed is False else "not_available_here"]
