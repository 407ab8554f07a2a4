"""Tests of scripts that run in forks of a process with torch. Each script behaves as in a process of its
own."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ledger
from children import forked


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_forked_script_gets_arguments_environment_and_folder(tmp_path: Path) -> None:
    text = "import atexit, os, sys\natexit.register(print, 'the end')\n"
    text += "print(__name__, sys.argv[1:], os.environ['ASKED'], os.getcwd(), sys.path[0])\nsys.exit(3)\n"
    done = forked(script(tmp_path, text), "one", "two", env={**os.environ, "ASKED": "yes"})
    assert done.stdout == f"__main__ ['one', 'two'] yes {os.getcwd()} {tmp_path}\nthe end\n"
    assert (done.returncode, done.stderr) == (3, "")


def test_a_script_may_raise_or_be_killed_or_be_interrupted(tmp_path: Path) -> None:
    raised = forked(script(tmp_path, "raise ValueError('of mine')"))
    assert raised.returncode == 1 and raised.stderr.endswith("ValueError: of mine\n")
    killed = forked(script(tmp_path, "import os\nos.kill(os.getpid(), 9)"))
    assert killed.returncode == -9
    pressed = "import os\ntry:\n    os.kill(os.getpid(), 2)\nexcept KeyboardInterrupt:\n    print('pressed')"
    assert forked(script(tmp_path, pressed)).stdout == "pressed\n"


def test_two_scripts_run_concurrently(tmp_path: Path) -> None:
    text = "import pathlib, sys, time\nmine, other = map(pathlib.Path, sys.argv[1:])\nmine.touch()\n"
    text += "while not other.exists():\n    time.sleep(0.01)\n"
    path, one, other = script(tmp_path, text), str(tmp_path / "one"), str(tmp_path / "other")
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda words: forked(path, *words), [(one, other), (other, one)])
        assert [each.returncode for each in done] == [0, 0]


def test_forked_script_has_torch_without_teraio_and_its_cpu_time_is_counted(tmp_path: Path) -> None:
    text = "import sys, time\nprint('torch._dynamo' in sys.modules, 'teraio' in sys.modules)\n"
    text += "while time.process_time() < 0.5:\n    pass\n"
    before = ledger.now()
    done = forked(script(tmp_path, text))
    assert done.stdout == "True False\n"
    assert (ledger.now() - before).cpu_s >= 0.5
