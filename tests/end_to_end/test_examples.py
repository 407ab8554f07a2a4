"""The examples, unchanged but in small sizes. The output of each example must prove the example's purpose."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import tree
from children import forked

EXAMPLES = tree.ROOT / "examples"
TINY = "--vocabulary 256 --hidden 128 --layers 6 --heads 4 --inner eager"
TRAINER = "--inner eager --hidden 128 --layers 4 --heads 4 --length 32 --batch 2 --memory 9MiB --every 2"
NEEDED = ("transformers", "peft", "accelerate")

# The arguments of each example. For each purpose of an example, this file has a test that reads the output.
RUNS = {
    "larger_than_memory": f"{TINY} --memory 8MiB --tokens 16 --steps 2",
    "streaming_inference": f"{TINY} --memory 6MiB --tokens 2",
    "per_block": f"{TINY} --memory 10MiB --batch 2 --length 32 --steps 5 --init",
    "linear_model": "--inner eager --chunks 12 --rows 512 --memory 8MiB --steps 6",
    "state_space": "--inner eager --memory 8MiB --steps 5 --channels 8 --states 4 --layers 4 "
    "--batch 2 --frames 4 --side 16",
    "offline_plan": f"{TINY} --memory 9MiB --batch 2 --length 32 --planner greedy --machines h100-4ssd",
    "train_llama": "--inner eager --memory 160MiB --steps 1",
    "sharded": f"{TINY} --memory 8MiB --tokens 16 --steps 3",
    "log_steps": "--inner eager --memory 160MiB --steps 1",
    "lora": f"{TINY} --memory 8MiB --length 16 --steps 7 --plain",
    "finetune_trainer": f"{TRAINER} --steps 2",
    "finetune_trainer again": f"{TRAINER} --steps 4 --resume --plain",
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the output of each example."""
    folder = tmp_path_factory.mktemp("examples")
    folders = {"finetune_trainer": "--output", "log_steps": "--folder"}
    without = {f"{name} without": RUNS[name] for name in ("lora", "finetune_trainer")}
    runs = {
        name: {
            "script": str(EXAMPLES / f"{name.split()[0]}.py"),
            "arguments": [
                *arguments.split(),
                *([folders[name.split()[0]], str(folder)] if name.split()[0] in folders else []),
            ],
            "missing": NEEDED if name in without else (),
        }
        for name, arguments in {**without, **RUNS}.items()
    }
    listed = folder / "runs.json"
    listed.write_text(json.dumps(list(runs.values())))
    # The tests would pass with any planner. Greedy takes a tenth of the default planner's time.
    settings = {**os.environ, "TERAIO_PLANNER": "greedy", "OMP_NUM_THREADS": "1"}
    done = forked(tree.SUPPORT / "examples_child.py", str(listed), env=settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(runs, json.loads(done.stdout.splitlines()[-1])))


def mib(row: str, text: str) -> float:
    """Return the number in a row of the output, such as `  peak of tensors    4.0 MiB`."""
    found = re.findall(rf"^  {row} +([0-9.]+) MiB$", text, re.MULTILINE)
    assert len(found) == 1, f"{row} in {text}"
    return float(found[0])


def same_losses(row: str, text: str) -> bool:
    return re.search(rf"^  losses equal {row} +yes$", text, re.MULTILINE) is not None


def within(text: str) -> bool:
    """Return True if (1) bytes were moved and (2) the peak of tensors was within the budget."""
    return 0 < mib("peak of tensors", text) <= mib("memory allowed", text) and mib("read from disk", text) > 0


def test_all_examples_run(texts: dict[str, str]) -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} - {"side_by_side"} == {n.split()[0] for n in RUNS}
    failed = [f"{name}:\n{texts[name]}" for name in RUNS if "Traceback" in texts[name]]
    assert not failed, "\n".join(failed)
    # An overrun is accepted only for inverse Fourier transforms (_fft_c2r). Their kernels allocate a
    # workspace, which the engine knows only after the first run of the kernel.
    unknown = re.compile(r"overrun: (?!kernel _fft_c2r_\d \(for itself\))")
    assert not [name for name in RUNS if unknown.search(texts[name])]
    assert {name for name in RUNS if "overrun" in texts[name]} <= {"state_space"}


@pytest.mark.parametrize("name", ["larger_than_memory", "streaming_inference"])
def test_example_runs_weights_larger_than_memory(texts: dict[str, str], name: str) -> None:
    weights = float(re.findall(r"weights ([0-9.]+) MiB", texts[name])[0])
    peak = float(re.findall(r"peak ([0-9.]+) MiB", texts[name])[0])
    assert peak < weights, texts[name]


def test_trainer_resumes_from_checkpoint_with_plain_losses(texts: dict[str, str]) -> None:
    first, second = texts["finetune_trainer"], texts["finetune_trainer again"]
    assert mib("weights gradients and states", first) > mib("memory allowed", first), first
    assert within(first), first
    assert re.search(r"^  began with +\S+checkpoint-2$", second, re.MULTILINE), second
    assert re.search(r"^  steps +4$", second, re.MULTILINE), second
    assert same_losses("plain ones", second), second
    assert within(second), second


def test_figures_of_each_step_are_in_a_file_for_tensorboard(
    texts: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert "log_steps" in texts  # the example has run
    assert [*tmp_path_factory.getbasetemp().glob("examples*/events.out.tfevents.*")]


def test_lora_reads_frozen_weights_and_never_writes_them(texts: dict[str, str]) -> None:
    text = texts["lora"]
    assert mib("frozen weights", text) > mib("peak of tensors", text), text
    assert mib("of them read in a planned step", text) > 1, text
    assert mib("read from disk", text) > mib("of them read in a planned step", text), text
    assert mib("of them written in a planned step", text) == 0, text
    assert same_losses("plain ones", text), text


@pytest.mark.parametrize("name", ["lora", "finetune_trainer"])
def test_example_with_missing_package_names_install_command(texts: dict[str, str], name: str) -> None:
    text = texts[f"{name} without"]
    assert re.search(r"^SystemExit: \w+ is missing: pip install .*transformers", text, re.MULTILINE), text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ModuleNotFoundError("No module named 'peft'", name="peft"), r"peft is missing: pip install peft"),
        (
            ModuleNotFoundError("No module named 'peft.x'", name="peft.x"),
            r"No module named 'peft\.x'.* pip install --upgrade peft transformers",
        ),
        (ImportError("tokenizers>=0.22 is required"), r"ImportError: tokenizers>=0\.22 is required.*upgrade"),
        (
            ModuleNotFoundError("No module named 'yaml'", name="yaml"),
            r"No module named 'yaml'.* install --upgrade",
        ),
    ],
)
def test_import_failure_message_fits_its_cause(
    error: ImportError, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    text = str(importlib.import_module("side_by_side").exit_for_import_error(error, "peft", "transformers"))
    assert re.search(expected, text) and "None" not in text and "\n" not in text, text


def test_model_that_is_no_folder_of_a_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    model_folder = importlib.import_module("side_by_side").model_folder
    with pytest.raises(argparse.ArgumentTypeError, match=r"has no config\.json and no \*\.safetensors; give"):
        model_folder(str(tmp_path / "missing"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(argparse.ArgumentTypeError, match=r"has no \*\.safetensors; give"):
        model_folder(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert model_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["lora", "finetune_trainer"])
def test_broken_package_is_not_reported_as_missing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace accelerate by a module that cannot be imported. Both examples import it first, and so end
    before the training."""
    (tmp_path / "accelerate.py").write_text("raise ImportError('psutil 9 is too old')\n")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in [each for each in sys.modules if each.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(SystemExit, match="psutil 9 is too old"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    monkeypatch.delitem(sys.modules, "accelerate", raising=False)


def test_blocks_share_one_program_and_keep_losses(texts: dict[str, str]) -> None:
    text = texts["per_block"]
    assert re.search(r"^  programs compiled for them +1$", text, re.MULTILINE), text
    assert mib("weights gradients and states", text) > mib("memory allowed", text), text
    assert same_losses("plain ones", text), text
    assert within(text), text


def test_offline_plan_is_replayed(texts: dict[str, str]) -> None:
    text = texts["offline_plan"]
    planned = re.findall(
        r"^  (\S+) +within 9.0 MiB: step [0-9.]+ s, bound [0-9.]+ s, gap", text, re.MULTILINE
    )
    assert planned == ["h100-4ssd", "here"], text
    assert "replaying" in text
    assert same_losses("those of the measured run", text), text
    assert within(text), text


def test_a_matrix_larger_than_memory_is_written_once(texts: dict[str, str]) -> None:
    text = texts["linear_model"]
    assert mib("matrix", text) > mib("memory allowed", text), text
    assert mib("written until the first epoch ended", text) >= mib("matrix", text), text
    assert mib("written after that", text) == 0, text
    assert mib("read from disk", text) > 2 * mib("matrix", text), text
    assert same_losses("those of the mapped file", text), text
    assert within(text), text


def test_fft_convolutions_train_below_plain_peak(texts: dict[str, str]) -> None:
    text = texts["state_space"]
    assert mib("peak of tensors", text) < 0.75 * mib("peak if nothing moves", text), text
    assert same_losses("plain ones", text), text
    assert within(text), text
