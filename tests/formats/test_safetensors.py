"""Tests with damaged or hostile headers and indexes: each raises an error that names the file."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from pathlib import Path

import pytest
import safetensors.torch
import torch

from teraio.errors import FileFormatError, TeraioError
from teraio.formats.safetensors import HEADER_BYTES_MAX, read_header, read_index


def header(text: str | bytes, data: int = 8, length: int | None = None) -> bytes:
    text = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def entry(name: str = "a", dtype: str = "F32", shape: str = "[2]", offsets: str = "[0,8]") -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


HOSTILE = {
    "nothing": b"",
    "short": b"\x01\0\0",
    "endless": header("{}", 0, 2**63),
    "longer than the file": header("{" + entry() + "}", 8, 10**6),
    "too long": header("{" + " " * (HEADER_BYTES_MAX + 1) + "}", 0),
    "no object": header("[1]", 0),
    "deep": header('{"a":' + "[" * 10**5, 0),
    "deep objects": header('{"a":' * 10**5, 0),
    "not ended": header("{" + entry(), 8),
    "behind": header("{" + entry() + "}}", 8),
    "twice": header("{" + entry() + "," + entry() + "}", 8),
    "key twice": header('{"a":{"dtype":"F32","dtype":"F64","shape":[1],"data_offsets":[0,8]}}', 8),
    "key missing": header('{"a":{"dtype":"F32","shape":[2]}}', 8),
    "dtype": header("{" + entry(dtype="F128") + "}", 8),
    "negative": header("{" + entry(offsets="[-8,0]") + "}", 8),
    "backwards": header("{" + entry(offsets="[8,0]") + "}", 8),
    "outside": header("{" + entry(offsets="[8,16]") + "}", 8),
    "one offset": header("{" + entry(offsets="[8]") + "}", 8),
    "huge": header("{" + entry(shape="[4294967296,4294967296]") + "}", 8),
    "number": header("{" + entry(offsets="[0," + "9" * 5000 + "]") + "}", 8),
    "fraction": header("{" + entry(shape="[2.0]") + "}", 8),
    "true": header("{" + entry(shape="true") + "}", 8),
    "overlap": header("{" + entry() + "," + entry("b", offsets="[4,8]", shape="[1]") + "}", 8),
    "hole": header("{" + entry() + "," + entry("b", offsets="[12,16]", shape="[1]") + "}", 16),
    "left": header("{" + entry() + "}", 9),
    "not text": header(b'{"\xff":1}', 8),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_in_bounded_memory(tmp_path: Path, name: str) -> None:
    file = tmp_path / "hostile.safetensors"
    file.write_bytes(HOSTILE[name])
    descriptor = os.open(file, os.O_RDONLY)
    tracemalloc.start()
    try:
        with pytest.raises(FileFormatError, match=r"hostile\.safetensors"):
            read_header(descriptor, str(file))
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
    finally:
        tracemalloc.stop()
        os.close(descriptor)


def test_a_flipped_byte_of_a_header_gives_at_most_a_format_error(tmp_path: Path) -> None:
    file = tmp_path / "flipped.safetensors"
    safetensors.torch.save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, file, {"format": "pt"})
    good, chance = file.read_bytes(), random.Random(0)
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            bad[chance.randrange(len(good) - 28)] = chance.randrange(256)
        file.write_bytes(bad)
        with open(file, "rb") as stream:
            try:
                read_header(stream.fileno(), "flipped")
            except TeraioError as error:
                assert isinstance(error, FileFormatError)


@pytest.mark.parametrize("file", ["../up.safetensors", "/abs.safetensors", "x.bin", "a\\u0000.safetensors"])
def test_an_index_that_names_files_elsewhere_is_refused(tmp_path: Path, file: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {}, "weight_map": {"a": "' + file + '"}}')
    with pytest.raises(FileFormatError, match="beside the index"):
        read_index(str(index))


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"weight_map": {}, "weight_map": {}}', '{"weight_map": 3}', ""]
)
def test_an_index_without_a_map_is_refused(tmp_path: Path, text: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(FileFormatError, match=r"index\.json"):
        read_index(str(index))


def test_an_index_larger_than_a_header_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    with open(index, "wb") as file:
        file.truncate(HEADER_BYTES_MAX + 1)
    with pytest.raises(FileFormatError, match="are read"):
        read_index(str(index))


def test_a_name_that_appears_twice_in_an_index_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    with pytest.raises(FileFormatError, match="a: the name appears twice"):
        read_index(str(index))


def test_a_file_truncated_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cut.safetensors"
    file.write_bytes(header("{" + entry() + "}"))
    pread = os.pread

    def read_then_cut(descriptor: int, length: int, at: int) -> bytes:
        piece = pread(descriptor, length, at)
        # The file ends after the length field and the first character of the header. The reader reads these
        # two parts separately.
        os.truncate(file, 9)
        return piece

    monkeypatch.setattr(os, "pread", read_then_cut)
    with open(file, "rb") as opened, pytest.raises(FileFormatError, match="the file ends in its header"):
        read_header(opened.fileno(), str(file))
