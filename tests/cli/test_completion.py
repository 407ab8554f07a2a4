"""Tests of the completion scripts.

The shells complete exactly the words that the command-line parser accepts.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

from teraio.cli import main
from teraio.cli.commands import completion


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> str:
    assert main.main(["completion", request.param]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("script", ["bash"], indirect=True)
@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        (["re"], {"report"}),
        (["plan", "--pl"], {"--plan-time", "--planner"}),
        (["explain", "a.json", "--what-if", ""], {"plan", "bound", "off"}),
        (["profile", ""], {"list", "show", "synth"}),
        (["machine", ""], {"list"}),
        (["profile", "synth", "--lo"], {"--loss-chunks"}),
        (["cache", "c"], {"clear"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
        (["doctor", "--sec"], set()),  # --seconds is a hidden flag, also for completion
    ],
)
def test_bash_completes_commands_flags_and_words(script: str, typed: list[str], wanted: set[str]) -> None:
    words = " ".join(f"'{word}'" for word in ("teraio", *typed))
    ask = f'COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _teraio; printf "%s\\n" "${{COMPREPLY[@]}}"'
    ran = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    assert set(ran.stdout.split()) == wanted


@pytest.mark.parametrize("script", ["bash", "zsh", "fish"], indirect=True)
def test_every_command_and_flag_is_in_every_script(script: str) -> None:
    for level in completion.completions_of_commands(main._make_parser()):
        for name in (*(name for name, _ in level.commands), *level.words):
            assert name in script
        for flag in level.flags:
            assert all(name.lstrip("-") in script for name in flag.names)


@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish_gets_one_command_per_line(script: str) -> None:
    assert all(line.startswith("complete -c teraio") for line in script.strip().splitlines())
    assert "-n '__fish_seen_subcommand_from plan' -l planner" in script
    assert completion._quote_for_fish("it's a\n \\ of 100%%") == "'it\\'s a \\\\ of 100%'"


@pytest.mark.parametrize(
    ("script", "shell"), [("bash", "bash"), ("zsh", "zsh"), ("fish", "fish")], indirect=["script"]
)
def test_completion_script_has_no_syntax_error(script: str, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert subprocess.run([shell, "-n"], input=script, text=True, check=False).returncode == 0
