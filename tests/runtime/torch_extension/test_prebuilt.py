"""Tests of prebuilt libraries. Each is loaded only into the torch and for the source it was built for."""

from __future__ import annotations

import ctypes
import logging
import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.version import git_version

from teraio.runtime.torch_extension import build, prebuilt
from teraio.runtime.torch_extension.prebuilt import Shim, digest_of, parts_of

INCLUDE = Path(torch.__file__).parent / "include"
HEADERS = ("c10/core/Allocator.h", "c10/core/CPUAllocator.h")
RELEASE = torch.__version__.partition("+")[0]


class Toy:
    """A loaded library that returns this identity."""

    def __init__(self, identity: str) -> None:
        self.teraio_built_for = _Function(identity)


class _Function:
    def __init__(self, identity: str) -> None:
        self.identity, self.restype = identity, None

    def __call__(self) -> bytes:
        return self.identity.encode()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "toy.cpp").write_text("int toy;")
    (tmp_path / "toy_part.h").write_text("// a part")
    return tmp_path / "toy.cpp"


@pytest.fixture
def shim(source: Path) -> Shim:
    """Write a library of bytes that no linker made, with a description that fits the installed torch."""
    folder = source.parent / "shims"
    folder.mkdir()
    shim = Shim(
        source="toy",
        release=RELEASE,
        commit=str(git_version),
        machine=platform.machine(),
        source_digest=digest_of(parts_of(source), source.parent),
        library_digest="",
        headers_digest=digest_of(HEADERS, INCLUDE),
        headers=HEADERS,
    )
    (folder / f"{shim.stem}.so").write_bytes(b"not a library")
    shim = replace(shim, library_digest=digest_of([f"{shim.stem}.so"], folder))
    shim.write(folder)
    return shim


def load(source: Path, identity: str) -> tuple[Any, str]:
    return prebuilt.load(source, source.parent / "shims", lambda path: Toy(identity))  # type: ignore[arg-type,return-value]


def test_library_is_loaded_into_the_torch_it_was_built_for(source: Path, shim: Shim) -> None:
    loaded, reason = load(source, shim.identity)
    assert loaded is not None and reason == ""


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda shim: replace(shim, commit="0" * 40), "of commit 000000000000"),
        (lambda shim: replace(shim, headers_digest="0"), "headers in torch/include are not the same"),
        (lambda shim: replace(shim, headers=("c10/none.h",)), "c10/none.h: No such file"),
        (lambda shim: replace(shim, source_digest="0"), "toy.cpp or its headers were changed"),
        (lambda shim: replace(shim, library_digest="0"), "is damaged"),
    ],
)
def test_each_difference_refuses_the_library(
    source: Path, shim: Shim, spoil: Callable[[Shim], Shim], words: str
) -> None:
    spoil(shim).write(source.parent / "shims")
    loaded, reason = load(source, shim.identity)
    assert loaded is None and words in reason, reason


def test_renamed_library_of_another_torch_is_refused(source: Path, shim: Shim) -> None:
    """Rename the files of another release to the name of the installed torch."""
    folder = source.parent / "shims"
    other = replace(shim, release="2.0.0")
    other.write(folder)
    (folder / f"{other.stem}.json").rename(folder / f"{shim.stem}.json")
    loaded, reason = load(source, other.identity)
    assert loaded is None and "is described as toy-2.0.0" in reason


def test_library_with_another_identity_is_refused(source: Path, shim: Shim) -> None:
    loaded, reason = load(source, "toy 2.0.0")
    assert loaded is None and "was built for 'toy 2.0.0'" in reason


def test_library_that_cannot_be_loaded_is_refused(source: Path, shim: Shim) -> None:
    loaded, reason = prebuilt.load(source, source.parent / "shims")
    assert loaded is None and "cannot be loaded" in reason


def test_debug_build_of_torch_gets_no_library(
    source: Path, shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "debug", True)
    loaded, reason = load(source, shim.identity)
    assert loaded is None and "debug" in reason


def test_damaged_description_is_refused_with_a_remedy(source: Path, shim: Shim) -> None:
    (source.parent / "shims" / f"{shim.stem}.json").write_text("{}")
    loaded, reason = load(source, shim.identity)
    assert loaded is None and "pip install --force-reinstall teraio" in reason


@pytest.mark.parametrize("version", ["2.99.0", f"{RELEASE}a0+git1234567"])
def test_torch_without_a_library_names_those_that_have_one(
    source: Path, shim: Shim, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    loaded, reason = load(source, shim.identity)
    assert loaded is None and f"there is one for {RELEASE}" in reason


def test_source_checkout_has_no_reason(tmp_path: Path, source: Path) -> None:
    assert prebuilt.load(source, tmp_path / "none") == (None, "")


# ---- what build_and_load does next


def test_refused_library_is_compiled_and_said(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prebuilt, "load", lambda source: (None, "torch 2.99.0 has no prebuilt toy"))
    monkeypatch.setattr(build, "build_unless_built", lambda *given: source)
    monkeypatch.setattr(ctypes, "CDLL", Toy)
    monkeypatch.setenv("CXX", "g++")
    with caplog.at_level(logging.INFO, "teraio"):
        assert isinstance(build.build_and_load(source, ["c10"]), Toy)
    assert "has no prebuilt toy; toy.cpp is compiled once for this torch" in caplog.text


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (
            "torch 2.99.0 has no prebuilt toy",
            r"no prebuilt toy; .*no C\+\+ compiler.*install g\+\+ or torch 2\.13\.0",
        ),
        ("", r"^there is no C\+\+ compiler.*install g\+\+$"),  # a source checkout
    ],
)
def test_without_compiler_and_library_the_error_names_the_remedy(
    source: Path, monkeypatch: pytest.MonkeyPatch, reason: str, text: str
) -> None:
    monkeypatch.setattr(prebuilt, "load", lambda source: (None, reason))
    monkeypatch.setattr(prebuilt, "releases", lambda source: ["2.13.0"])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(OSError, match=text):
        build.build_and_load(source, ["c10"])
