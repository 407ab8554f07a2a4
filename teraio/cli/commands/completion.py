"""`teraio completion`: scripts that complete command lines in a shell. They are made from the command-line
parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass

DESCRIPTION = """\
Prints a script that completes commands, flags and their values in a shell. The script is made from the same
tables as --help of this version."""

EPILOG = """\
examples:
  teraio completion bash > ~/.local/share/bash-completion/completions/teraio
  teraio completion zsh >> ~/.zshrc
  teraio completion fish > ~/.config/fish/completions/teraio.fish"""


@dataclass(frozen=True, slots=True)
class Flag:
    names: tuple[str, ...]
    values: tuple[str, ...]  # all values that the flag takes; empty if it takes any value
    takes: bool  # True: a value follows the flag
    help: str


@dataclass(frozen=True, slots=True)
class CommandCompletions:
    """The words that may follow `teraio` and the commands in `path` on a command line."""

    path: tuple[str, ...]
    commands: tuple[tuple[str, str], ...]  # (name, help)
    flags: tuple[Flag, ...]
    words: tuple[str, ...]  # values of positional arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def main(args: argparse.Namespace) -> int:
    found = list(completions_of_commands(args.whole))
    print({"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[args.shell](found))
    return 0


def completions_of_commands(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[CommandCompletions]:
    """Yield the completions after this parser's command, and then the completions after each of its
    subcommands."""
    flags, words = [], list[str]()
    commands: dict[str, argparse.ArgumentParser] = {}
    help_texts: list[tuple[str, str]] = []
    for action in parser._actions:
        choices = action.choices or ()
        if isinstance(action, argparse._SubParsersAction):
            commands = dict(action.choices)
            help_texts = [(each.dest, each.help or "") for each in action._choices_actions]
        elif action.help == argparse.SUPPRESS:
            continue
        elif action.option_strings:
            takes = action.nargs != 0
            names = tuple(action.option_strings)
            flags.append(Flag(names, tuple(map(str, choices)), takes, action.help or ""))
        else:
            words += map(str, choices)
    yield CommandCompletions(path, tuple(help_texts), tuple(flags), tuple(words))
    for name, command in commands.items():
        yield from completions_of_commands(command, (*path, name))


def bash_script(found: list[CommandCompletions]) -> str:
    """Return a bash function that offers the words that may follow the words before the cursor.

    If no words are known, the function offers files.
    """
    cases, values = [], []
    for level in found:
        key = " ".join(("teraio", *level.path))
        names = [name for flag in level.flags for name in flag.names]
        then = [*(name for name, _ in level.commands), *level.words]
        cases.append(f'    "{key}") flags="{" ".join(names)}"; words="{" ".join(then)}" ;;')
        for flag in level.flags:
            if flag.values:
                values += [
                    f'    "{key} {name}") words="{" ".join(flag.values)}"; only=1 ;;' for name in flag.names
                ]
    paths = " | ".join(f'"{" ".join(("teraio", *level.path))}"' for level in found if level.path)
    return "\n".join(
        [
            "_teraio() {",
            "  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}",
            '  local key="teraio" flags="" words="" only="" at',
            "  for ((at = 1; at < COMP_CWORD; at++)); do",
            '    case "$key ${COMP_WORDS[at]}" in',
            f'    {paths}) key="$key ${{COMP_WORDS[at]}}" ;;',
            "    esac",
            "  done",
            '  case "$key" in',
            *cases,
            "  esac",
            '  case "$key $before" in',
            *values,
            "  esac",
            '  if [[ -z $only && $current == -* ]]; then words="$flags"; only=1; fi',
            '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
            '  if [[ -z $only && -z $words ]]; then COMPREPLY=($(compgen -f -- "$current")); fi',
            "}",
            "complete -o filenames -F _teraio teraio",
        ]
    )


def zsh_script(found: list[CommandCompletions]) -> str:
    return "\n".join(
        [
            "autoload -U +X compinit && compinit -i",
            "autoload -U +X bashcompinit && bashcompinit",
            bash_script(found),
        ]
    )


def fish_script(found: list[CommandCompletions]) -> str:
    lines = ["complete -c teraio -e"]
    for level in found:
        names = [name for name, _ in level.commands]
        seen = [f"__fish_seen_subcommand_from {name}" for name in level.path]
        conditions = seen + [f"not __fish_seen_subcommand_from {' '.join(names)}"] * bool(names)
        when = f" -n {_quote_for_fish('; and '.join(conditions))}" if conditions else ""
        for name, help_text in level.commands:
            lines.append(f"complete -c teraio{when} -f -a {name} -d {_quote_for_fish(help_text)}")
        if level.words:
            lines.append(f"complete -c teraio{when} -f -a {_quote_for_fish(' '.join(level.words))}")
        for flag in level.flags:
            lines.append(f"complete -c teraio{when}{_fish_arguments_of_flag(flag)}")
    return "\n".join(lines)


def _fish_arguments_of_flag(flag: Flag) -> str:
    names = "".join(f" -l {n[2:]}" if n.startswith("--") else f" -s {n[1:]}" for n in flag.names)
    follows = f" -x -a {_quote_for_fish(' '.join(flag.values))}" if flag.values else " -r" * flag.takes
    return f"{names}{follows} -d {_quote_for_fish(flag.help)}"


def _quote_for_fish(text: str) -> str:
    """Return the text on one line, quoted for fish. Replace `%%`, which argparse uses for a percent sign."""
    line = re.sub(r"\s+", " ", text).replace("%%", "%")
    return "'" + line.replace("\\", "\\\\").replace("'", "\\'") + "'"
