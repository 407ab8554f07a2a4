"""Promises about programs that Inductor made: they are the plain ones but for the slots, they come back from
its cache with the slots they were made with, and its modes and settings change nothing of that."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import cache
from typing import Any

import tree
from children import ended, forked
from recompute_runs import child as recompute_child
from test_fx_slots import WORKSPACES, beyond

HERE = tree.SUPPORT
# Of 34 MB that plain training takes.
OURS = {"task": "train", "name": "ours", "budget": 27_000_000, "whole": True}
LESS = {**OURS, "name": "less", "budget": 20_400_000, "options": {"warmup": 1}}
PLAIN = {"task": "train", "name": "plain", "whole": True}
CACHE = tempfile.TemporaryDirectory(prefix="teraio-inductor-")


def child(*asked: dict[str, Any], flags: tuple[str, ...] = ()) -> dict[str, Any]:
    script, environment = HERE / "compile_child.py", {**os.environ, "TORCHINDUCTOR_CACHE_DIR": CACHE.name}
    if flags:
        done = ended([sys.executable, *flags, str(script), json.dumps(asked)], env=environment)
    else:
        done = forked(script, json.dumps(asked), env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


@cache
def cold() -> dict[str, Any]:
    """The first process: Inductor's cache is empty, then holds the programs of a plain compile."""
    return child(PLAIN, OURS, LESS)


@cache
def warm() -> dict[str, Any]:
    """The second, without asserts: nothing that keeps a program from losing its slots may be one."""
    cold()
    return child(
        OURS,
        {**OURS, "name": "graph by graph", "whole": False},
        PLAIN,
        {**OURS, "name": "another version", "version": "another"},
        {"task": "twins", "name": "twins"},
        {"task": "slotted", "name": "lite", "model": "block", "mode": "lite"},
        {
            "task": "slotted",
            "name": "tuned",
            "model": "block",
            "mode": "max-autotune-no-cudagraphs",
            "inductor": {"allow_buffer_reuse": False, "inplace_buffers": False},
        },
        flags=("-O",),
    )


def right(run: dict[str, Any]) -> bool:
    """The numbers of the plain run, within the budget, with moves."""
    plain = cold()["plain"]
    same = run["losses"] == plain["losses"] and run["digest"] == plain["digest"]
    return bool(same and run["peak"] <= OURS["budget"] < plain["peak"] and run["evictions"] > 50)


def test_inductor_trains_bit_equal_within_three_fifths_of_its_memory() -> None:
    """Of a larger model it is little more than half: test_training, among the long cases."""
    less, plain = cold()["less"], cold()["plain"]
    assert less["losses"] == plain["losses"] and less["digest"] == plain["digest"]
    assert less["peak"] <= LESS["budget"] < 0.61 * plain["peak"]
    assert less["last"]["misses"] == 0
    assert less["last"]["fetches"] > 10


def test_programs_of_a_plain_compile_never_come_back() -> None:
    ours = cold()["ours"]
    assert (ours["whole"], ours["hits"], ours["misses"], ours["bypasses"]) == (0, 0, 2, 0)
    assert right(ours)


def test_a_second_process_finds_both_programs_with_their_slots() -> None:
    """Whether AOTAutograd brings the whole model back, without calling us, or Inductor each of its graphs."""
    runs = warm()
    assert runs["optimized"], "asserts were on: the test shows less than it says"
    for name, whole in ("ours", 1), ("graph by graph", 0):
        run = runs[name]
        assert (run["whole"], run["hits"], run["misses"]) == (whole, 2, 0), name
        assert right(run), name
        assert run["slots"] == cold()["ours"]["slots"] > 50


def test_a_program_is_guarded_wherever_it_came_from() -> None:
    """What ends it in the middle is told to the engine, which brings the weights back."""
    runs = [cold()["ours"], *(warm()[name] for name in ("ours", "graph by graph", "another version"))]
    assert [run["abandoned"] for run in runs] == [1] * 4


def test_a_plain_compile_still_finds_its_own_programs() -> None:
    plain = warm()["plain"]
    assert (plain["whole"], plain["hits"], plain["misses"]) == (1, 2, 0)
    assert not any("teraio" in program for program in plain["printed"])


def test_programs_of_another_version_of_the_pass_never_come_back() -> None:
    other = warm()["another version"]
    assert (other["whole"], other["hits"], other["misses"]) == (0, 0, 2)
    assert right(other)


def test_a_twin_that_shows_what_the_other_saves_does_not_get_its_program() -> None:
    """Both forwards are one graph: Inductor's own key is the same."""
    twins = warm()["twins"]
    assert twins["roles"] == [["result", "saved"], ["result", "result"]]
    assert (twins["hits"], twins["misses"]) == (0, 1)
    assert twins["equal"]


def test_the_program_is_the_plain_one_but_for_its_slots() -> None:
    """Not only the kernels, name for name: every line, in the same order."""
    runs = cold()
    pairs = list(zip(runs["plain"]["printed"], runs["ours"]["printed"], strict=True))
    assert len(pairs) == 2
    for plain, ours in pairs:
        assert ours.count("_teraio_slot(") > 20
        assert plain.count("cpp_fused_") > 20
        assert code(ours) == code(plain)


def code(program: str) -> list[str]:
    """Without our lines, and without the first, which numbers the compilations of a process."""
    return [line for line in program.splitlines()[1:] if "_teraio_" not in line]


def test_modes_and_settings_change_no_bit_and_hide_no_byte() -> None:
    for name in ("lite", "tuned"):
        run = warm()[name]
        assert run["equal"], name
        assert run["evicted"] > 100, "nothing moved: the test shows nothing"
        assert run["notices"] == []
        excess = {kernel.removeprefix("torch.ops.aten."): over for kernel, over in run["excess"].items()}
        assert beyond(excess, WORKSPACES) == {}


def test_settings_reach_the_backward_which_is_compiled_later() -> None:
    assert all("# reuse" in program for program in cold()["plain"]["printed"])
    tuned = warm()["tuned"]["printed"]
    assert len(tuned) == 4  # forward and backward, plainly and with slots
    assert not any("# reuse" in program for program in tuned)


def test_a_mode_is_the_one_of_inductor() -> None:
    """`lite` fuses nothing: each operator is a kernel of its own."""
    forward, backward = warm()["lite"]["kernels"]
    assert len(forward) + len(backward) > 80
    assert not any(kernel.startswith("cpp_fused") for kernel in forward)


def test_what_is_made_again_is_compiled_once_more_and_found_again() -> None:
    """The cut is in the keys of AOTAutograd's cache and Inductor's; the bits are those of the same cut
    without a budget."""
    common = {"model": "mlp", "layers": 2, "cache": True}
    auto = {**common, "budget": 9_500_000, "options": {"recompute": "auto", "inner": "inductor"}}
    cut = {**common, "name": "cut", "cut": "auto", "options": {"inner": "inductor"}}
    runs = recompute_child([{**auto, "name": "auto"}, {**auto, "name": "later"}, cut])
    assert runs["auto"]["nodes"] and runs["auto"]["nodes"] == runs["later"]["nodes"] == runs["cut"]["nodes"]
    assert (runs["auto"]["compiles"], runs["later"]["compiles"]) == (2, 1)
    assert runs["auto"]["losses"] == runs["later"]["losses"] == runs["cut"]["losses"]
    assert runs["auto"]["digest"] == runs["later"]["digest"] == runs["cut"]["digest"]
    assert max(runs["auto"]["peaks"]) <= 9_500_000 and runs["auto"]["counts"][-1]["planned_moves"]
