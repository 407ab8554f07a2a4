"""Tests of `teraio run`: an unchanged script gives the same bits, and sees the same surroundings."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import children
import launched_train
import pytest
import torch
import tree

from teraio import in_place, models
from teraio.cli import main
from teraio.cli.run import split_command
from teraio.errors import OptionError
from teraio.integrations.compiled_models import reason_not_to_compile
from teraio.launch import compile_calls, moved_models, program, run_lines, trained_models

SCRIPTS = tree.SUPPORT / "launched_train.py", tree.SUPPORT / "launched_script.py"
# Half of the plain peak. The weights, gradients and states of a case take 24 MiB.
MEMORY = "14MiB"
COMPILED = {
    "uncompiled": ["Net"],
    "of_torch_modules": ["Sequential"],
    "compiled_after_the_optimizer": [],
    "compiled_in_blocks": ["Linear"],
    "other_methods": ["Block"] * launched_train.DEPTH + ["Linear"],
    "two_models": ["Net", "Net"],
    "frozen_part": ["Net"],
    "added_weights": ["Net", "Net"],
    "copies": ["Net"],
    "partly_traced": ["Causal", "TransformerDecoder"] + ["TransformerDecoderLayer"] * launched_train.DEPTH,
    "closures": ["Net"],
    "updated_by_script": ["Net", "Net"],
    "foreign_backend": [],
}
# Cases that compute the same as `uncompiled`. A plain run would compile them, which takes long.
SAME = ("compiled_after_the_optimizer", "compiled_in_blocks", "other_methods", "closures", "foreign_backend")
# Cases that fit into the budget, or whose programs are not teraio's.
UNEVICTED = ("frozen_part", "foreign_backend")


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, dict[str, Any]]]:
    """Run all cases plainly, and wrapped as `teraio run` wraps them."""
    names = [case.__name__ for case in launched_train.CASES]
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("TERAIO_MEMORY", MEMORY)
        variables.setenv("TERAIO_INNER", "eager")
        plain = children.forked_rows(SCRIPTS[0], "plain", *(name for name in names if name not in SAME))
        launched = children.forked_rows(SCRIPTS[0], "launched", *names, "uncompiled=disabled")
    modes = {"plain": plain, "launched": launched}
    return {mode: {row["case"]: row for row in found} for mode, found in modes.items()}


@pytest.mark.parametrize("name", COMPILED)
def test_unchanged_script_trains_with_equal_bits(name: str, rows: dict[str, Any]) -> None:
    plain, launched = rows["plain"]["uncompiled" if name in SAME else name], rows["launched"][name]
    assert launched["digest"] == plain["digest"]
    assert launched["compiled"] == COMPILED[name]
    assert launched["peak_bytes"] <= 14 * 2**20
    assert (launched["evictions"] > 0) == (name not in UNEVICTED)
    if name in ("uncompiled", "closures"):
        assert (launched["steps"], launched["evaluations"]) == (launched_train.STEPS, 0)
    if name == "updated_by_script":  # the first step runs before the models are compiled
        assert (launched["steps"], launched["evaluations"]) == (launched_train.STEPS - 1, 1)


def test_classes_of_torch_do_not_share_code() -> None:
    """Dynamo compiles a code object only for a few classes, and then runs it as plain Python."""
    linears, norm = [torch.nn.Linear(2, 2) for _ in range(2)], torch.nn.LayerNorm(2)
    codes = [in_place._function_to_trace(module).__code__ for module in (*linears, norm)]
    assert codes[0] is codes[1] and codes[1] is not codes[2]
    assert [code.co_name for code in codes[1:]] == ["call_Linear", "call_LayerNorm"]


def test_callback_of_a_trainer_may_compile_a_model_before_its_first_call() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    for module in model.modules():
        vars(module)[in_place.PLACE] = trained_models.FirstCall(module)
    assert reason_not_to_compile(model) is None
    vars(model[0])[in_place.PLACE] = print
    assert reason_not_to_compile(model) == "its module '0' is already compiled"


def test_disabled_run_compiles_the_same_model_without_a_budget(rows: dict[str, Any]) -> None:
    disabled = rows["launched"]["uncompiled=disabled"]
    assert disabled["compiled"] == ["Net"] and disabled["peak_bytes"] == 0
    assert disabled["digest"] == rows["plain"]["uncompiled"]["digest"]


def run_script(*start: str) -> tuple[dict[str, Any], str]:
    command = [sys.executable, *start, str(SCRIPTS[1]), "4", "--memory", "3GiB"]
    done = children.ended(command, given="a line\n")
    assert done.returncode == 7, done.stderr
    return json.loads(done.stdout), done.stderr


def test_script_sees_the_surroundings_of_a_plain_run() -> None:
    plain, _ = run_script()
    flags = ("-m", "teraio", "run", "--memory", MEMORY, "--inner", "eager")
    launched, lines = run_script(*flags)
    assert launched == plain
    assert "teraio: compiles Net (1,492,840 parameters) at its first call" in lines
    assert "teraio: the run: 4 steps; peak 13.8 MiB of 14 MiB; wrote" in lines
    assert "TERAIO_RUN" not in lines


def test_command_begins_at_the_first_word_that_is_no_flag() -> None:
    words = ["run", "--memory", "2GiB", "--inner=eager", "train.py", "--memory", "3", "--", "-x"]
    assert split_command(words) == (words[:4], words[4:])
    assert split_command(["run", "--keep", "a", "-m", "package.train", "-v"])[1] == [
        "-m",
        "package.train",
        "-v",
    ]
    assert split_command(["run", "--memory", "2GiB", "--", "-odd.py"])[1] == ["-odd.py"]
    assert split_command(["plan", "train.py"]) == (["plan", "train.py"], [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the script is missing"),
        (["--memory", "2GiB"], "the script is missing"),
        (["-m"], "the name of the module is missing"),
        (["trian.py"], "trian.py: there is no such file in"),
        (["no-such-program"], "and no such program in PATH"),
        (["--memory", "2G", "train.py"], "2G"),
        (["--memory=2GiB", "--inner", "jax", "train.py"], "'jax' is not one of inductor, eager"),
    ],
)
def test_bad_input_gives_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert main.main(["run", *words]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and message in printed.err and not printed.out


def test_program_is_a_script_a_module_or_a_program(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("folder").mkdir()
    for command in (["train.py", "--a"], ["folder"], ["-m", "package.train"]):
        assert program.find_program(command)[0] == sys.executable
        assert program.find_program(command)[-len(command) :] == command
    assert program.find_program(["env", "x"]) == ["/usr/bin/env", "x"]


def test_flags_and_bootstrap_are_in_the_environment() -> None:
    flags = argparse.Namespace(memory="2GiB", keep=["a.*", "b"])
    before = {"PYTHONPATH": "lib", "TERAIO_MEMORY": "1GiB", "TERAIO_INNER": "eager"}
    environment = program.run_environment(flags, before)
    assert environment["TERAIO_MEMORY"] == "2GiB" and environment["TERAIO_KEEP"] == "a.*,b"
    assert environment["PYTHONPATH"] == f"{program.BOOTSTRAP}:lib"
    assert program.run_environment(flags, environment)["PYTHONPATH"] == environment["PYTHONPATH"]
    with pytest.raises(OptionError, match="TERAIO_WARMUP"):
        program.run_environment(flags, {"TERAIO_WARMUP": "many"})


def arguments(**given: Any) -> dict[str, Any]:
    return compile_calls._arguments_for_teraio("f", given)


def test_compile_calls_keep_what_teraio_can_use(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(run_lines, "_said", set())
    assert arguments() == arguments(backend="inductor") == {"backend": "teraio", "options": None}
    assert arguments(fullgraph=True, mode="default") == {
        "fullgraph": True,
        "backend": "teraio",
        "options": None,
    }
    assert arguments(backend="eager")["options"] == {"inner": "eager"}
    assert arguments(mode="max-autotune-no-cudagraphs")["options"] == {"mode": "max-autotune-no-cudagraphs"}
    for own in ({"backend": "teraio", "options": {"memory": "1GiB"}}, {"backend": print}):
        assert arguments(**own) == own
    assert "keeps its backend print" in capsys.readouterr().err


def test_settings_that_teraio_refuses_are_left_out(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(run_lines, "_said", set())
    assert arguments(mode="reduce-overhead")["options"] is None
    assert "left out CUDA graphs of mode 'reduce-overhead'" in capsys.readouterr().err
    options = {"triton.cudagraphs": True, "epilogue_fusion": False, "guard_filter_fn": len}
    kept = {"inductor": {"epilogue_fusion": False}, "guard_filter_fn": len}
    assert arguments(options=options)["options"] == kept
    assert "triton.cudagraphs" in options  # the script's own dict is unchanged
    monkeypatch.setenv("TERAIO_INNER", "eager")
    assert arguments(mode="max-autotune", options={"epilogue_fusion": False})["options"] is None


@pytest.mark.parametrize(
    ("memory", "reserved", "within"),
    [("1GiB", 0, False), ("16MiB", 0, True), ("", 0, False), ("min", 0, False), ("", 22 << 20, True)],
)
def test_model_that_does_not_fit_moves_within_the_budget(
    memory: str, reserved: int, within: bool, monkeypatch: Any, capsys: Any
) -> None:
    """The model has 20 MiB, and the GPU has 40 MiB."""
    opened = []

    @contextmanager
    def open_block(device: torch.device) -> Iterator[None]:
        opened.append(device)
        yield

    monkeypatch.setenv("TERAIO_MEMORY", memory)
    for name, value in {
        "is_available": True,
        "current_device": 1,
        "mem_get_info": (40 * 2**20 - reserved, 40 * 2**20),
        "memory_allocated": reserved,
        "memory_reserved": reserved,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(models, "init_on", open_block)
    monkeypatch.setattr(run_lines, "_said", set())
    model = torch.nn.Linear(2048, 2560, bias=False)
    for device in (None, torch.device("cpu"), torch.device("meta")):
        with moved_models._budget_for_move(model, device):
            assert not opened
    with moved_models._budget_for_move(model, torch.device("cuda")):
        assert opened == ([torch.device("cuda", 1)] if within else [])
    assert ("Linear (20 MiB) does not fit on cuda:1 within the budget" in capsys.readouterr().err) == within


def test_moves_keep_what_torch_does(monkeypatch: Any) -> None:
    for name in ("to", "cuda"):
        monkeypatch.setattr(torch.nn.Module, name, getattr(torch.nn.Module, name))
    moved_models.watch_moves()
    model = torch.nn.Linear(2, 2)
    assert model.to(torch.float64) is model and model.weight.dtype is torch.float64
    assert model.to(device="meta", non_blocking=True).weight.is_meta
    with pytest.raises(TypeError, match="floating point"):
        model.to(torch.int64)
    if not torch.cuda.is_available():
        given: Any
        for given in (None, 0, "cuda:0"):
            with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
                model.cuda(given)


def test_end_of_a_run_without_compilation_warns_and_imports_nothing(monkeypatch: Any, caplog: Any) -> None:
    for name in [name for name in sys.modules if name.startswith("teraio.session")]:
        monkeypatch.delitem(sys.modules, name)
    run_lines._say_at_end()
    assert "no budget was kept, because nothing was compiled" in caplog.text
    assert not [name for name in sys.modules if name.startswith("teraio.session")]
    caplog.clear()
    with monkeypatch.context() as patched:
        patched.setenv("TERAIO_DISABLE", "1")
        run_lines._say_at_end()
    monkeypatch.setattr(run_lines, "_compiled", 1)  # a model was compiled, and then an error ended the run
    run_lines._say_at_end()
    assert not caplog.text
