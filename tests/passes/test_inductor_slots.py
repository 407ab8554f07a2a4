"""Tests of programs that Inductor makes.

Except for added slots, the programs are equal to the programs of a compile without teraio. Inductor's cache
returns each program with its slots. This holds for all modes and settings of Inductor.
"""

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

SUPPORT = tree.SUPPORT
# Budgets of runs. The same training without teraio takes 34 MB.
OURS = {"task": "train", "name": "ours", "budget": 27_000_000, "whole": True}
LESS = {**OURS, "name": "less", "budget": 20_400_000, "options": {"warmup": 1}}
PLAIN = {"task": "train", "name": "plain", "whole": True}
CACHE = tempfile.TemporaryDirectory(prefix="teraio-inductor-")


def child(*runs: dict[str, Any], flags: tuple[str, ...] = ()) -> dict[str, Any]:
    script, environment = SUPPORT / "compile_child.py", {**os.environ, "TORCHINDUCTOR_CACHE_DIR": CACHE.name}
    if flags:
        done = ended([sys.executable, *flags, str(script), json.dumps(runs)], env=environment)
    else:
        done = forked(script, json.dumps(runs), env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


@cache
def cold() -> dict[str, Any]:
    """Run the first process, in which Inductor's cache is empty at the beginning.

    The plain compile comes first. For the other compiles, the cache has the programs of the plain compile,
    which they must not use.
    """
    return child(PLAIN, OURS, LESS)


@cache
def warm() -> dict[str, Any]:
    """Run the second process, which gets programs from the cache of the first process.

    The flag `-O` disables asserts, and the checks for slots must work without asserts.
    """
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
    """Return True if a run has (1) the numbers of the plain run, (2) a peak within the budget, and (3) enough
    evictions."""
    plain = cold()["plain"]
    same = run["losses"] == plain["losses"] and run["digest"] == plain["digest"]
    return bool(same and run["peak"] <= OURS["budget"] < plain["peak"] and run["evictions"] > 50)


def test_inductor_trains_bit_equal_within_three_fifths_of_its_memory() -> None:
    """Train with 0.61 of the memory of the plain run.

    In test_training.py, a larger model trains with little more than half of its plain run's memory.
    """
    less, plain = cold()["less"], cold()["plain"]
    assert less["losses"] == plain["losses"] and less["digest"] == plain["digest"]
    assert less["peak"] <= LESS["budget"] < 0.61 * plain["peak"]
    assert less["last"]["misses"] == 0
    assert less["last"]["fetches"] > 10


def test_cache_never_returns_programs_of_a_plain_compile() -> None:
    ours = cold()["ours"]
    assert (ours["whole"], ours["hits"], ours["misses"], ours["bypasses"]) == (0, 0, 2, 0)
    assert right(ours)


def test_second_process_gets_both_programs_with_slots_from_cache() -> None:
    """Check AOTAutograd's cache, which has whole models, and Inductor's cache, which has single graphs."""
    runs = warm()
    assert runs["optimized"], "the child ran with asserts, so this test shows less than intended"
    for name, whole in ("ours", 1), ("graph by graph", 0):
        run = runs[name]
        assert (run["whole"], run["hits"], run["misses"]) == (whole, 2, 0), name
        assert right(run), name
        assert run["slots"] == cold()["ours"]["slots"] > 50


def test_program_is_guarded_if_compiled_and_if_cached() -> None:
    """Interrupt a program by an exception. The program must report this to the engine, which then fetches the
    weights.

    Check a program that has just been compiled, and programs from a cache.
    """
    runs = [cold()["ours"], *(warm()[name] for name in ("ours", "graph by graph", "another version"))]
    assert [run["abandoned"] for run in runs] == [1] * 4


def test_plain_compile_gets_its_own_programs_from_cache() -> None:
    plain = warm()["plain"]
    assert (plain["whole"], plain["hits"], plain["misses"]) == (1, 2, 0)
    assert not any("teraio" in program for program in plain["printed"])


def test_cache_never_returns_programs_of_another_version() -> None:
    other = warm()["another version"]
    assert (other["whole"], other["hits"], other["misses"]) == (0, 0, 2)
    assert right(other)


def test_models_with_equal_forward_and_other_outputs_share_no_program() -> None:
    """Compile two models with equal forward graphs and different outputs. Inductor computes the same cache
    key for both graphs."""
    twins = warm()["twins"]
    assert twins["roles"] == [["result", "saved"], ["result", "result"]]
    assert (twins["hits"], twins["misses"]) == (0, 1)
    assert twins["equal"]


def test_program_equals_the_plain_one_except_slots() -> None:
    """Compare every line of the two programs in order."""
    runs = cold()
    pairs = list(zip(runs["plain"]["printed"], runs["ours"]["printed"], strict=True))
    assert len(pairs) == 2
    for plain, ours in pairs:
        assert ours.count("_teraio_slot(") > 20
        assert plain.count("cpp_fused_") > 20
        assert code(ours) == code(plain)


def code(program: str) -> list[str]:
    """Return the program's lines without slots.

    The first line is left out, because it contains the number of the compile in this process.
    """
    return [line for line in program.splitlines()[1:] if "_teraio_" not in line]


def test_modes_and_settings_keep_numbers_and_byte_counts_right() -> None:
    for name in ("lite", "tuned"):
        run = warm()[name]
        assert run["equal"], name
        assert run["evicted"] > 100, "too few evictions for this test to show anything"
        assert run["notices"] == []
        excess = {kernel.removeprefix("torch.ops.aten."): over for kernel, over in run["excess"].items()}
        assert beyond(excess, WORKSPACES) == {}


def test_settings_reach_the_backward() -> None:
    assert all("# reuse" in program for program in cold()["plain"]["printed"])
    tuned = warm()["tuned"]["printed"]
    assert len(tuned) == 4  # a forward and a backward, each compiled without and with slots
    assert not any("# reuse" in program for program in tuned)


def test_mode_lite_fuses_no_kernels() -> None:
    """Compile in Inductor's mode `lite`, which fuses nothing, so that each operator is a separate kernel."""
    forward, backward = warm()["lite"]["kernels"]
    assert len(forward) + len(backward) > 80
    assert not any(kernel.startswith("cpp_fused") for kernel in forward)


def test_recompute_compiles_once_more_and_is_cached() -> None:
    """Check that the cut between forward and backward is part of the cache keys of AOTAutograd and Inductor.

    The numbers are bit-equal to the numbers of a run with the same cut and without a budget.
    """
    common = {"model": "mlp", "layers": 2, "cache": True}
    auto = {**common, "budget": 9_500_000, "options": {"recompute": "auto", "inner": "inductor"}}
    cut = {**common, "name": "cut", "cut": "auto", "options": {"inner": "inductor"}}
    runs = recompute_child([{**auto, "name": "auto"}, {**auto, "name": "later"}, cut])
    assert runs["auto"]["nodes"] and runs["auto"]["nodes"] == runs["later"]["nodes"] == runs["cut"]["nodes"]
    assert (runs["auto"]["compiles"], runs["later"]["compiles"]) == (2, 1)
    assert runs["auto"]["losses"] == runs["later"]["losses"] == runs["cut"]["losses"]
    assert runs["auto"]["digest"] == runs["later"]["digest"] == runs["cut"]["digest"]
    assert max(runs["auto"]["peaks"]) <= 9_500_000 and runs["auto"]["counts"][-1]["planned_moves"]
