"""Tests of the file formats. A written value can be read again, its text is stable, and an error names a
broken rule."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import tree
from files_made import Data, everything
from hypothesis import HealthCheck, given, settings

from teraio.errors import FileFormatError
from teraio.formats import fields
from teraio.formats.machine import Link, Machine, Tier
from teraio.formats.plan import Evict, Fetch, Home, Plan
from teraio.formats.profile import Kernel, Profile, Tensor
from teraio.formats.timeline import Span, Timeline

PLAN = Plan(
    "f00",
    "auto",
    8,
    (Home("w", "ssd"),),
    (Evict("w", "host", 20, 13), Fetch("w", "host", 30, 40), Evict("v", "ssd", 3)),
)
PROFILE = Profile(
    "p",
    9,
    (Kernel("k", 0, 1), Kernel("k", 0, 2, 3, p90_ns=4, busy_ns=5)),
    (Tensor("w", "weight", 4, True, (0,), (1,)), Tensor("a", "activation", 4, False, (1,), (0,), (0,))),
)
MACHINE = Machine(
    "m", (Tier("device", 8), Tier("ssd", 100)), (Link("device", "ssd", 1, 2, "up"),), (("up", 5),)
)
TIMELINE = Timeline("measured", (Span("compute", "k", 0, 5),))
MACHINES = tree.ROOT / "profiles" / "machines"
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(everything)
def test_a_written_value_is_read_back_equal(value: Data) -> None:
    text = value.dumps()
    assert type(value).loads(text) == value
    assert type(value).loads(text.encode()) == value
    assert type(value).loads(gzip.compress(text.encode())) == value
    assert type(value).loads(text).dumps() == text


@quick
@given(everything)
def test_the_text_is_plain_json_with_sorted_keys_and_one_entry_per_line(value: Data) -> None:
    text = value.dumps()
    top = json.loads(text)
    # Other tools may write files with any order of keys and any white space.
    assert type(value).loads(json.dumps(top, indent=3)) == value
    assert type(value).loads(json.dumps(dict(reversed(top.items())))) == value
    assert list(top) == sorted(top)
    entries = sum(
        len(part) for key, part in top.items() if isinstance(part, list | dict) and key != "predicted"
    )
    filled = sum(
        1 for key, part in top.items() if part and isinstance(part, list | dict) and key != "predicted"
    )
    assert text.count("\n") == 2 + len(top) + entries + filled


@pytest.mark.parametrize("value", [PLAN, PROFILE, MACHINE, TIMELINE], ids=lambda value: type(value).__name__)
def test_a_file_has_the_same_bytes_on_each_write(value: Data, tmp_path: Path) -> None:
    for name in ("a.json", "b.json.gz"):
        path = tmp_path / name
        value.write(path)
        first = path.read_bytes()
        value.write(path)
        assert path.read_bytes() == first
        assert type(value).read(path) == value
    assert sorted(os.listdir(tmp_path)) == ["a.json", "b.json.gz"]


def test_the_examples_of_the_format_can_be_read() -> None:
    """Read the example of the documentation. Its keys are not sorted, and white space is between its
    entries."""
    plan = Plan.loads(
        '{"format":"teraio-plan","version":1,"fingerprint":"x","planner":"auto","budget_bytes":21474836480,\n'
        ' "homes":[{"tensor":"layers.0.wq.exp_avg","tier":"ssd"}],\n'
        ' "moves":[{"move":"evict","tensor":"layers.0.wq","to":"host","trigger":13,"free":20},'
        '{"move":"fetch","tensor":"layers.0.wq","from":"host","trigger":801,"ready":840}],\n'
        ' "recompute":[],"predicted":{"step_ns":0,"bound_ns":0,"peak_bytes":0}}'
    )
    assert plan.moves == (Evict("layers.0.wq", "host", 20, 13), Fetch("layers.0.wq", "host", 801, 840))


def test_a_drop_is_an_evict_without_a_trigger() -> None:
    text = PLAN.dumps()
    assert '{"free":3,"move":"evict","tensor":"v","to":"ssd"}' in text
    assert Plan.loads(text.replace('{"free":3,"move":"evict"', '{"free":3,"move":"drop"')) == PLAN


def test_keys_with_a_default_may_be_omitted() -> None:
    assert Plan.loads(
        '{"budget_bytes":1,"fingerprint":"","format":"teraio-plan","moves":[],"planner":"","version":1}'
    ) == Plan("", "", 1)


def tensor(**changes: Any) -> Tensor:
    return dataclasses.replace(PROFILE.tensors[0], **changes)


# A value, a change that breaks one of its rules, and words that the error must contain. The words name the
# place and the wrong value.
BROKEN: list[tuple[Data, dict[str, Any], str]] = [
    (PLAN, {"budget_bytes": -1}, "budget_bytes: is -1"),
    (PLAN, {"budget_bytes": 2**53}, "budget_bytes: is 9007199254740992"),
    (PLAN, {"budget_bytes": 1.5}, "budget_bytes: is 1.5; expected an integer"),
    (PLAN, {"budget_bytes": True}, "budget_bytes: is true; expected an integer"),
    (PLAN, {"fingerprint": "x" * 1025}, "fingerprint: has 1025 characters"),
    (PLAN, {"fingerprint": "a\nb"}, "fingerprint: holds \\n"),
    (
        PLAN,
        {"homes": (Home("w", "ssd"), Home("w", "host"))},
        'homes[1].tensor: "w" appears already at homes[0]',
    ),
    (PLAN, {"homes": [Home("w", "ssd")]}, "homes: is a list; expected a tuple"),
    (PLAN, {"recompute": ("a", "a")}, 'recompute[1]: "a" appears already at recompute[0]'),
    (PLAN, {"moves": (Evict("w", "host", 1, 2),)}, "moves[0].trigger: is 2, after free at 1"),
    (PLAN, {"moves": (Fetch("w", "host", 3, 2),)}, "moves[0].trigger: is 3, after ready at 2"),
    (PLAN, {"moves": (Evict("w", "device", 2, 1),)}, "moves[0].to: is device"),
    (PLAN, {"moves": (Fetch("w", "device", 1, 2),)}, "moves[0].from: is device"),
    (PLAN, {"moves": (Evict("w", "host", 2**33),)}, "moves[0].free: is 8589934592"),
    (PLAN, {"moves": (Evict("", "host", 2),)}, "moves[0].tensor: has 0 characters"),
    (PROFILE, {"kernels": PROFILE.kernels[:1]}, "tensors[0].writes: holds tick 1; there are 1 kernels"),
    (PROFILE, {"kernels": (Kernel("k", 2**32, 1),) * 2}, "kernels[0].call: is 4294967296"),
    (PROFILE, {"kernels": (Kernel("k", 0, 2**52),) * 2}, "kernels: duration_ns adds up to 9007199254740992"),
    (PROFILE, {"tensors": PROFILE.tensors[:1] * 2}, 'tensors[1].name: "w" appears already at tensors[0]'),
    (
        PROFILE,
        {"tensors": (Tensor("w", "weight", 4, True, (1, 0), ()),)},
        "tensors[0].reads: holds 0 after 1",
    ),
    (
        PROFILE,
        {"tensors": (Tensor("w", "weight", 4, True, (1, 1), ()),)},
        "tensors[0].reads: holds 1 after 1",
    ),
    (PROFILE, {"tensors": (Tensor("w", "grad", 4, False, (), ()),)}, "tensors[0].writes: is empty"),
    (
        PROFILE,
        {"tensors": (Tensor("w", "grad", 4, False, (0,), (1,)),)},
        "tensors[0].reads: starts at tick 0",
    ),
    (PROFILE, {"tensors": (tensor(persistent=1),)}, "tensors[0].persistent: is 1; expected true"),
    (PROFILE, {"tensors": (tensor(kind="wight"),)}, "did you mean weight?"),
    (MACHINE, {"tiers": MACHINE.tiers[1:]}, "tiers: has no tier named device; found ssd"),
    (MACHINE, {"tiers": MACHINE.tiers * 2}, '"device" appears already'),
    (MACHINE, {"shared": ()}, 'links[0].shares: is "up"; no such name is known'),
    (MACHINE, {"links": (Link("device", "sdd", 1),)}, 'links[0].to: is "sdd"; expected one of device, ssd'),
    (MACHINE, {"links": (Link("ssd", "ssd", 1),)}, 'links[0].to: is "ssd", where the link starts'),
    (MACHINE, {"links": (Link("device", "ssd", 0),)}, "links[0].bandwidth_bytes_per_s: is 0"),
    (
        MACHINE,
        {"links": (Link("device", "ssd", 1),) * 2},
        "links[1]: device to ssd appears already at links[0]",
    ),
    (TIMELINE, {"kind": "guessed"}, 'kind: is "guessed"; expected one of measured, predicted'),
    (TIMELINE, {"spans": (Span("compute", "k", 2, 1),)}, "spans[0].start_ns: is 2, after end_ns at 1"),
]


@pytest.mark.parametrize(("value", "change", "words"), BROKEN, ids=[words for _, _, words in BROKEN])
def test_a_broken_rule_is_named_before_anything_is_written(
    value: Data, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    broken = dataclasses.replace(value, **change)
    for refuse in (broken.validate, broken.dumps, lambda: broken.write(tmp_path / "x.json")):
        with pytest.raises(FileFormatError) as error:
            refuse()
        assert words in str(error.value)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(("value", "change", "words"), BROKEN, ids=[words for _, _, words in BROKEN])
def test_reading_refuses_every_value_that_writing_refuses(
    value: Data, change: dict[str, Any], words: str
) -> None:
    """Write each broken value without validation. Reading the file must raise an error."""
    text = fields.encode_file_text(value.file_format, dataclasses.replace(value, **change))
    if "tuple" in words:  # the file has a list in place of the tuple, which makes it valid
        return
    with pytest.raises(FileFormatError):
        type(value).loads(text)


def test_a_table_with_too_many_entries_is_refused(tmp_path: Path) -> None:
    many = {f"t{i}": {"capacity_bytes": 1} for i in range(1025)}
    text = json.dumps({**json.loads(MACHINE.dumps()), "tiers": many})
    with pytest.raises(FileFormatError, match=r"tiers: line 1, column \d+: has more than 1024 entries"):
        Machine.loads(text)


def test_too_many_uses_of_one_or_all_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = dataclasses.replace(PROFILE, kernels=(Kernel("k", 0, 1),) * (2**16 + 1))
    often = tensor(reads=tuple(range(1, 2**16 + 1)), writes=(0,))
    with pytest.raises(FileFormatError, match=r"tensors\[0\]: has 65537 uses; at most 65536 are taken"):
        dataclasses.replace(busy, tensors=(often,)).dumps()
    monkeypatch.setattr("teraio.formats.profile.USES_MAX", 3)
    two = (tensor(name="a", reads=(1,), writes=(0,)), tensor(name="b", reads=(1,), writes=(0,)))
    with pytest.raises(FileFormatError, match=r"tensors\[1\]: brings the uses to 4; at most 3 are taken"):
        dataclasses.replace(PROFILE, tensors=two).dumps()


def test_missing_keys_are_named() -> None:
    top = json.loads(PROFILE.dumps())
    for key in ("format", "version", "name", "step_ns", "kernels", "tensors"):
        with pytest.raises(FileFormatError, match=f": {key}: is missing$"):
            Profile.loads(json.dumps({k: v for k, v in top.items() if k != key}))
    del top["kernels"][1]["duration_ns"]
    with pytest.raises(FileFormatError, match=r"kernels\[1\].duration_ns: line 1, column \d+: is missing"):
        Profile.loads(json.dumps(top))


def test_writing_keeps_the_mode_and_follows_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "a.json", tmp_path / "link.json"
    old = os.umask(0o027)
    try:
        PLAN.write(target)
        assert stat.S_IMODE(target.stat().st_mode) == 0o640
    finally:
        os.umask(old)
    target.chmod(0o600)
    link.symlink_to(target)
    PLAN.write(link)
    assert link.is_symlink() and stat.S_IMODE(target.stat().st_mode) == 0o600


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    PLAN.write(path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileFormatError, match="No space left on device"):
        dataclasses.replace(PLAN, planner="none").write(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_device_or_fifo_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in ("/dev/null", tmp_path / "fifo", tmp_path):
        with pytest.raises(FileFormatError, match="expected a regular file"):
            PLAN.write(path)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("path", sorted(MACHINES.glob("*.json")), ids=lambda path: path.name)
def test_shipped_machines_equal_their_rewritten_text(path: Path) -> None:
    machine = Machine.read(path)
    assert f"{machine.name}.machine.json" == path.name
    assert machine.dumps() == path.read_text()
