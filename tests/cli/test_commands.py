"""Tests of the commands that plan without training.

The printed figures equal the plan's figures. Bad input gives an error of one line.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import toys
import tree

from teraio.cli import main
from teraio.cli.run import split_command
from teraio.errors import PlanError
from teraio.formats.machine import Machine
from teraio.formats.plan import Evict, Fetch, Plan
from teraio.formats.plan_check import check_plan_against_profile
from teraio.formats.profile import Profile
from teraio.formats.timeline import Timeline
from teraio.passes.planner import planners
from teraio.passes.planner.bound import bound
from teraio.passes.planner.problem.problem import build_problem

ROOT = tree.ROOT
DIAMOND_PLAN = Plan("", "hand", 8, (), (Evict("a", "ssd", 4, 1), Fetch("a", "ssd", 6, 9)))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Write three files: the profile `diamond` of toys.py, a plan for it, and the machine of toys.py.

    Within 8 bytes of memory, the best step of this profile takes 12 us.
    """
    paths = {name: str(tmp_path / f"{name}.json") for name in ("profile", "machine", "plan", "out")}
    toys.diamond().write(paths["profile"])
    toys.machine().write(paths["machine"])
    DIAMOND_PLAN.write(paths["plan"])
    return paths


@pytest.fixture
def out(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str, code: int = 0) -> str:
        assert main.main(arguments) == code
        printed = capsys.readouterr()
        if code:
            assert printed.err.startswith("teraio: ") and printed.err.count("\n") == 1, printed.err
            return printed.err
        return printed.out

    return run


def test_plan_prints_the_figures_of_the_plan(files: dict[str, str], out: Any) -> None:
    arguments = ("plan", files["profile"], "--machine", files["machine"], "-o", files["out"])
    made = json.loads(out(*arguments, "--json", "--endurance", "1GB"))
    assert (made["step_ns"], made["compute_ns"], made["bound_ns"]) == (12_000, 10_000, made["bound_ns"])
    assert 10_000 <= made["bound_ns"] <= 12_000
    assert (made["ssd_write_bytes"], made["ssd_read_bytes"], made["peak_bytes"]) == (4, 4, 6)
    # Each step writes 4 bytes and takes 12,000 ns. Steps write 4 * 86,400 * 10^9 / 12,000 bytes a day, which
    # is 28.8 GB. The drives are rated for 1 GB, so they last 0 whole days.
    assert (made["ssd_write_bytes_per_day"], made["ssd_life_days"]) == (28_800_000_000, 0)
    assert made["feasible"] and made["memory_bytes"] == 8 and made["plan_ns"] > 0
    assert check_plan_against_profile(Plan.read(files["out"]), toys.diamond(), toys.machine()).feasible
    text = out(*arguments, "--endurance", "300TB")
    assert "a step of 12 µs" in text and "28.5 years until" in text
    assert "8 hours until" in out(*arguments, "--endurance", "10GB")
    assert "under an hour until" in out(*arguments, "--endurance", "1GB")


def test_life_of_drives_depends_on_their_size_and_not_on_the_room(
    files: dict[str, str], tmp_path: Path, out: Any
) -> None:
    measured = toys.machine()
    tiers = [replace(tier, drive_bytes=10**9) if tier.name == "ssd" else tier for tier in measured.tiers]
    path = tmp_path / "small.machine.json"
    replace(measured, tiers=tuple(tiers)).write(path)
    made = json.loads(out("plan", files["profile"], "--machine", str(path), "--json"))
    assert made["ssd_endurance_bytes"] == 600 * 10**9


def test_plan_json_without_a_plan_gives_the_reason(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--machine", files["machine"], "--memory", "5B", "--json")
    assert main.main(["plan", files["profile"], *where]) == 1
    printed = capsys.readouterr()
    made = json.loads(printed.out)
    assert (made["feasible"], made["memory_bytes"], made["smallest_bytes"]) == (False, 5, 6)
    assert made["why"] in printed.err


def test_profile_show_prints_bytes_by_kind_at_the_peak(files: dict[str, str], out: Any) -> None:
    made = json.loads(out("profile", "show", files["profile"], "--json"))
    assert made["kinds"] == {"activation": {"tensors": 2, "bytes": 10, "at_peak_bytes": 10}}
    assert (made["peak_tick"], made["peak_bytes"], made["smallest_bytes"]) == (4, 10, 6)
    assert "peak at kernel k4 (tick 4)" in out("profile", "show", files["profile"])


def test_plan_with_a_write_cap_writes_less_per_day(files: dict[str, str], out: Any) -> None:
    arguments = ("plan", files["profile"], "--machine", files["machine"], "-o", files["out"], "--json")
    freely = json.loads(out(*arguments))
    cap = freely["ssd_write_bytes_per_day"] // 2
    capped = json.loads(out(*arguments, "--max-write-per-day", str(cap)))
    assert 0 < capped["ssd_write_bytes_per_day"] <= cap
    assert capped["step_ns"] > freely["step_ns"]
    everyone = json.loads(out(*arguments, "--planner", "all", "--max-write-per-day", str(cap)))
    assert everyone["best"]
    assert all(row["ssd_write_bytes_per_day"] <= cap for row in everyone["planners"])


def test_all_planners_are_compared_and_the_fastest_plan_is_written(
    files: dict[str, str], out: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(problem: Any, machine: Any, budget_bytes: int, **rest: Any) -> Plan:
        return Plan("", "", budget_bytes, (), (Evict("a", "ssd", 4, 1), Fetch("a", "ssd", 9, 9)))

    def never(problem: Any, machine: Any, budget_bytes: int, **rest: Any) -> Plan:
        raise PlanError("7 bytes over budget")

    known = {name: planners.PLANNERS[name] for name in ("auto", "greedy", "none")}
    table = {**known, "slow": slow, "never": never}
    monkeypatch.setattr(planners, "PLANNERS", table)
    arguments = ("plan", files["profile"], "--machine", files["machine"], "--planner", "all")
    made = json.loads(out(*arguments, "--json", "-o", files["out"]))
    rows = {row["planner"]: row for row in made["planners"]}
    assert made["best"] in {"auto", "greedy"}
    assert rows["slow"]["step_ns"] == 15_000  # kernels, plus 1 us for the eviction and 4 us for the fetch
    assert made["refused"] == {"never": "7 bytes over budget"}
    assert Plan.read(files["out"]).predicted.step_ns == rows[made["best"]]["step_ns"] == 12_000
    assert {row["bound_ns"] for row in made["planners"]} == {made["bound_ns"]}
    text = out(*arguments)
    marked = [line for line in text.splitlines() if line.startswith("  * ")]
    assert len(marked) == 1 and made["best"] in marked[0]
    assert "never: no plan: 7 bytes over budget" in text and "on demand" in text


def test_simulate_predicts_the_step_computed_by_hand(files: dict[str, str], out: Any) -> None:
    arguments = ("simulate", files["plan"], files["profile"], "--machine", files["machine"])
    made = json.loads(out(*arguments, "--json", "-o", files["out"]))
    assert (made["step_ns"], made["compute_ns"], made["stall_ns"], made["peak_bytes"]) == (
        12_000,
        10_000,
        2_000,
        6,
    )
    lane = {"busy_ns": 4_000, "bytes": 4}
    assert made["links"] == {"evict:ssd": lane, "fetch:ssd": lane}
    assert sum(stall.ns for stall in Timeline.read(files["out"]).stalls) == 2_000
    assert "a step of 12 µs: 10 µs of compute, 2 µs of waiting" in out(*arguments)


def test_explain_lists_waits_and_effects_of_changes(files: dict[str, str], out: Any) -> None:
    arguments = ("explain", files["plan"], files["profile"], "--machine", files["machine"])
    made = json.loads(out(*arguments, "--json"))
    waits = {(w["tensor"], w["cause"], w["kernel"]): w["ns"] for w in made["waits"]}
    assert waits == {("a", "link busy", "k4"): 1_000, ("a", "late read", "k9"): 1_000}
    assert made["written_bytes"] == made["read_bytes"] == {"activation": 4}
    steps = {answer["change"]: answer["step_ns"] for answer in made["what_if"]}
    # One more drive removes every wait, and so does enough device memory for all tensors. More host memory
    # does not, because the host link has a latency of 10 us.
    assert steps == {
        "planned again": 12_000,
        "1 drive more": 10_000,
        "64 GiB more host memory": 12_000,
        "8 GiB more device memory": 10_000,
    }
    text = out(*arguments)
    assert "2 µs of waiting (1 µs for late read, 1 µs for link busy)" in text
    assert "written to SSD:" in text and "1 drive more" in text
    assert "what if" not in out(*arguments, "--what-if", "off")
    bounds = json.loads(out(*arguments, "--what-if", "bound", "--json"))["what_if"]
    assert all(10_000 <= answer["bound_ns"] <= 12_000 and answer["step_ns"] is None for answer in bounds)


def test_bound_is_equal_in_plan_explain_and_report(files: dict[str, str], out: Any) -> None:
    """Check that `explain` and `report` print the lower bound of the step time that `plan` has computed."""
    profile, machine = toys.training_profile(), toys.machine(device=10_000, ssd=10_000, rate=400_000)
    profile.write(files["profile"])
    machine.write(files["machine"])
    where, budget = (files["profile"], "--machine", files["machine"], "--plan-time", "10s"), 1_500
    line = str(Path(files["out"]).with_name("line.json"))
    made = json.loads(
        out("plan", *where, "--memory", str(budget), "-o", files["plan"], "--timeline", line, "--json")
    )
    assert made["bound_ns"] > bound.simple_bound_ns(build_problem(profile, machine), budget)
    for by in ("bound", "plan"):
        answer = json.loads(out("explain", files["plan"], *where, "--what-if", by, "--json"))
        assert answer["what_if"][0]["change"] == "planned again"
        assert answer["what_if"][0]["bound_ns"] == made["bound_ns"], by
    options = ("--profile", files["profile"], "--plan", files["plan"], "--machine", files["machine"])
    answer = json.loads(out("report", line, *options, "--what-if", "bound", "--json"))
    (sentence,) = [text for text in answer["sentences"] if "No plan for this profile takes less" in text]
    assert f"less than {answer['tables']['what_if']['rows'][0][-1]};" in sentence


def test_explain_with_shared_links_predicts_the_planned_step(files: dict[str, str], out: Any) -> None:
    root = ROOT / "profiles"
    machine = str(root / "machines/h100-4ssd.machine.json")
    profile = str(root / "gpt2-b16.profile.json.gz")
    out("plan", profile, "--machine", machine, "--memory", "3GiB", "-o", files["out"])
    text = out("explain", files["out"], profile, "--machine", machine, "--what-if", "off", "--top", "1")
    row = next(line for line in text.splitlines() if line.strip().startswith("fetch:host"))
    assert "52 GB/s" in row and "fetch:ssd" in row
    answer = out("explain", files["out"], profile, "--machine", machine, "--what-if", "off", "--json")
    made = Plan.read(files["out"]).predicted
    assert json.loads(answer)["step_ns"] == made.step_ns >= made.bound_ns
    assert "links share bandwidth; without sharing" in text


def test_fit_finds_the_smallest_budget_that_is_fast_enough(files: dict[str, str], out: Any) -> None:
    arguments = ("fit", files["profile"], "--machine", files["machine"])
    toys.machine(device=100).write(files["machine"])
    made = json.loads(out(*arguments, "--within", "1.2", "--json"))
    assert made["smallest_bytes"] == 6
    for fit in made["fits"]:
        again = planners.plan(toys.diamond(), toys.machine(device=100), fit["memory_bytes"])
        assert fit["step_ns"] == again.predicted.step_ns
    enough = [fit["memory_bytes"] for fit in made["fits"] if fit["step_ns"] <= 12_000]
    assert made["within_bytes"] == min(enough) <= 8
    # A step that takes no longer than its kernels has no time for moves. So all 10 bytes must fit into
    # memory.
    whole = json.loads(out(*arguments, "--within", "1", "--json"))
    assert whole["within_bytes"] == 10
    assert "10 B keep the step within 1x" in out(*arguments, "--within", "1")


def test_fit_marks_the_largest_batch_within_the_factor(
    files: dict[str, str], out: Any, tmp_path: Path
) -> None:
    paths = []
    for size in (100, 200, 4000):
        paths.append(str(tmp_path / f"b{size}.json"))
        made = toys.training_profile(size=size)
        kernels = tuple(type(k)(k.name, k.call, k.duration_ns * size // 100) for k in made.kernels)
        Profile(f"b{size}", 0, kernels, made.tensors).write(paths[-1])
    toys.machine(device=10**6, ssd=10**6, rate=10**8).write(files["machine"])
    arguments = ("fit", *paths, "--machine", files["machine"], "--memory", "2500B", "--within", "1.05")
    made = json.loads(out(*arguments, "--json"))
    assert [fit["step_ns"] is not None for fit in made["fits"]] == [True, True, False]
    assert made["best"] == "b200" and "step needs" in made["fits"][2]["why"]
    assert "* b200" in out(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (("plan", "missing.json", "--machine", "{machine}"), "missing.json: No such file", 2),
        (("plan", "{plan}", "--machine", "{machine}"), "teraio-profile", 2),
        (("plan", "{profile}", "--machine", "{machine}", "--planner", "gredy"), "did you mean greedy", 2),
        (("plan", "{profile}", "--machine", "{machine}", "--memory", "2 blobs"), "unknown unit 'blobs'", 2),
        (("plan", "{profile}", "--machine", "{machine}", "--endurance", "x"), "--endurance: 'x'", 2),
        (("plan", "{profile}", "--machine", "{machine}", "--memory", "5B"), "Give at least 6 bytes", 1),
        (("simulate", "{other}", "{profile}", "--machine", "{machine}"), "no tensor of that name", 1),
        (("explain", "{plan}", "{profile}", "--machine", "{bare}"), "no link from 'device' to 'ssd'", 1),
        (("fit", "{profile}", "--machine", "{machine}", "--within", "0.5"), "--within '0.5' is not", 2),
        (("fit", "{profile}", "--machine", "{machine}", "--within", "nan"), "--within 'nan' is not", 2),
        (("fit", "{profile}", "--machine", "{machine}", "--probes", "-1"), "--probes is -1", 2),
    ],
)
def test_bad_input_is_one_line_with_the_remedy(
    arguments: tuple[str, ...], words: str, code: int, files: dict[str, str], out: Any, tmp_path: Path
) -> None:
    files["bare"], files["other"] = str(tmp_path / "bare.json"), str(tmp_path / "other.json")
    Machine("bare", toys.machine().tiers[:1], ()).write(files["bare"])
    Plan("f" * 32, "x", 8, (), (Evict("z", "ssd", 4, 1),)).write(files["other"])
    assert words in out(*(a.format(**files) for a in arguments), code=code)


def test_commands_on_any_valid_files_end_without_a_traceback(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the commands on (1) steps without kernels, (2) machines without drives, links or memory, (3) plans
    for other steps.
    """
    machines = [
        toys.machine(),
        toys.machine(device=10_000, ssd=10_000, host=50),
        Machine("bare", toys.machine().tiers[:1], ()),
        Machine("linkless", toys.machine().tiers, ()),
        Machine("nothing", (replace(toys.machine().tiers[0], capacity_bytes=0),), ()),
    ]
    profiles = [Profile("empty", 0, (), ()), toys.profile([], 3), toys.profile([toys.weight("w", 9, ())], 0)]
    codes = set()
    for seed, machine in product(range(8), machines):
        profile = profiles[seed] if seed < len(profiles) else toys.random_profile(seed)
        profile.write(files["profile"])
        machine.write(files["machine"])
        where = ("--machine", files["machine"])
        if machine.tiers[0].capacity_bytes > 1000:
            assert main.main(["plan", files["profile"], *where, "-o", files["plan"]]) == 0
        for command in (
            ("plan", files["profile"], *where, "--planner", "all", "--memory", "min"),
            ("simulate", files["plan"], files["profile"], *where),
            ("explain", files["plan"], files["profile"], *where),
            ("fit", files["profile"], *where, "--probes", "1"),
            ("profile", "show", files["profile"]),
            ("fit", files["profile"], files["profile"], *where),
        ):
            codes.add(code := main.main(command))
            printed = capsys.readouterr()
            assert code in (0, 1) and (printed.out or printed.err), command
    assert codes == {0, 1}


def test_commands_in_the_docs_are_parsed() -> None:
    text = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    blocks = "\n".join(re.findall(r"^```[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    lines = re.findall(r"^(?:\$ )?teraio (.*?)(?:  +#.*)?$", blocks, re.MULTILINE)
    assert len(lines) >= 8
    for line in lines:
        words, _ = split_command(shlex.split(line))
        assert callable(main._make_parser().parse_args(words).run), line


@pytest.mark.parametrize("command", [name for name, _, _ in main.COMMANDS])
def test_help_of_every_command_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: teraio {command}" in text
    assert "example" in text and f"\n  teraio {command}" in text
    assert "%%" not in text and "%(" not in text
    # Of the first three commands, only subcommands have the flag --json. The output of `run` is the script's.
    assert "--json" in text or command in ("profile", "machine", "completion", "run")
