"""Tests of the files that teraio ships: commands accept a file's name instead of a path, and suggest the
nearest name after a typo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toys

from teraio.cli import main
from teraio.formats import shipped_files
from teraio.formats.plan import Plan
from teraio.formats.profile import Profile


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty folder, in which the test runs its commands. Return the folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main.main(words) == code, capsys.readouterr()
    output = capsys.readouterr()
    return output.err if code else output.out


def test_every_command_accepts_names_of_shipped_files(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("gpt2-b16", "--machine", "rtx4090-1ssd")
    small = ("--memory", "3GiB", "--planner", "greedy", "--plan-time", "1s")
    ran(capsys, "plan", *where, *small, "-o", "p.json", "--timeline", "t.json")
    assert json.loads(ran(capsys, "simulate", "p.json", *where, "--json"))["step_ns"] > 41_937_191
    assert "a step of" in ran(capsys, "explain", "p.json", *where, "--what-if", "off")
    assert json.loads(ran(capsys, "fit", *where, *small, "--probes", "0", "--json"))["fits"]
    assert "448 kernels" in ran(capsys, "profile", "show", "gpt2-b16")
    named = ("--profile", "gpt2-b16", "--machine", "rtx4090-1ssd.machine.json", "--what-if", "off")
    assert "gpt2-s1024-b16" in ran(capsys, "report", "t.json", *named, "--plan", "p.json")


def test_a_file_has_priority_over_a_shipped_name_but_a_folder_has_not(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toys.machine().write(empty / "rtx4090-1ssd")
    toys.diamond().write(empty / "gpt2")
    (empty / "h100-4ssd").mkdir()
    (empty / "gpt2-b16").mkdir()
    assert shipped_files.read_named_machine("rtx4090-1ssd") == toys.machine()
    assert shipped_files.read_named_machine("h100-4ssd").name == "h100-4ssd"
    assert shipped_files.read_named_profile("gpt2-b16").name.startswith("gpt2-s1024")
    made = json.loads(ran(capsys, "plan", "gpt2", "--machine", "rtx4090-1ssd", "--json"))
    assert made["compute_ns"] == toys.diamond().compute_ns


def test_a_model_stands_for_one_sequence_on_the_machines_accelerator(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    took = {}
    for machine in ("h100-4ssd", "rtx4090-1ssd"):
        assert main.main(["plan", "gpt2", "--machine", machine, "--planner", "none", "--json"]) == 0
        output = capsys.readouterr()
        took[machine] = json.loads(output.out)["compute_ns"]
        assert "gpt2 is a model: using gpt2-s1024-b1" in output.err
    assert took["rtx4090-1ssd"] > 2 * took["h100-4ssd"]
    rates = ("--flop-rate", "110T", "--memory-bandwidth", "800GB/s")
    ran(capsys, "profile", "synth", "gpt2", *rates, "-o", "one.json")
    assert Profile.read("one.json").compute_ns == took["rtx4090-1ssd"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan", "gpt2-b6", "--machine", "h100-4ssd"), "did you mean gpt2-b16?; there are gpt2-b16, llama"),
        (("plan", "gpt2-b16", "--machine", "rtx4090"), "did you mean rtx4090-4ssd?; there are a100-80-4ssd,"),
        (("plan", "lama-3.1-8b", "--machine", "h100-4ssd"), "did you mean llama-3.1-8b?"),
        (
            ("plan", "gpt2", "--machine", "h100-4sd.machine.json"),
            "did you mean h100-4ssd?; names that",
        ),
        (
            ("profile", "show", "./none.json"),
            "none.json: No such file; names that need no file: teraio",
        ),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_names(
    words: tuple[str, ...], message: str, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = ran(capsys, *words, code=2)
    assert message in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("pln",), "'pln' is unknown; did you mean plan?"),
        (("profile", "lst"), "'lst' is unknown; did you mean list?"),
        (("cache", "lis"), "'lis' is unknown; did you mean list?"),
        (("plan", "gpt2", "--mahcine", "h100-4ssd"), "there is no flag --mahcine; did you mean --machine?"),
        (
            ("plan", "gpt2", "--machine", "h100-4ssd", "--memroy=1"),
            "flag --memroy; did you mean --memory?",
        ),
        (("--versoin",), "there is no flag --versoin; did you mean --version?"),
        (("explain", "--what-if", "bond"), "'bond' is unknown; did you mean bound?"),
    ],
)
def test_a_mistyped_word_is_refused_with_a_guess(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main.main(words)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_flags_may_be_abbreviated_and_a_double_dash_ends_them(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toys.diamond().write(empty / "--odd")
    toys.machine().write(empty / "machine.json")
    assert json.loads(ran(capsys, "plan", "--mach", "machine.json", "--js", "--", "--odd"))["feasible"]


@pytest.mark.parametrize(
    "shipped", [shipped_files.PROFILES, shipped_files.MACHINES], ids=["profile", "machine"]
)
def test_shipped_files_are_listed(
    shipped: shipped_files.ShippedFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ran(capsys, shipped.kind, "list")
    listed: dict[str, Any] = json.loads(ran(capsys, shipped.kind, "list", "--json"))
    profiles = shipped is shipped_files.PROFILES
    about = shipped_files.ABOUT_PROFILES if profiles else shipped_files.ABOUT_MACHINES
    assert [row["name"] for row in listed[f"{shipped.kind}s"]] == shipped.names() == sorted(about)
    for row in listed[f"{shipped.kind}s"]:
        assert Path(row["path"]).is_file() and f"  {row['name']}  " in text and row["what"] in text
    if profiles:
        assert {"name": "gpt2", "parameters": 124_439_808} in listed["models"] and "  gpt2  " in text


def test_a_plan_is_read_only_from_a_file(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Plan("", "x", 8).write(empty / "gpt2-b16")
    printed = ran(capsys, "simulate", "gpt2-b16", "gpt2-b16", "--machine", "h100-4ssd", code=2)
    assert "teraio-profile" in printed
