"""`teraio completion`: what a shell needs to complete our command lines, made from the parser itself."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass

DESCRIPTION = """\
Prints a script that makes a shell complete commands, flags and their words. It is made from the same tables
as --help, so it knows what this version knows."""

EPILOG = """\
examples:
  teraio completion bash > ~/.local/share/bash-completion/completions/teraio
  teraio completion zsh >> ~/.zshrc
  teraio completion fish > ~/.config/fish/completions/teraio.fish"""


@dataclass(frozen=True, slots=True)
class Flag:
    names: tuple[str, ...]
    words: tuple[str, ...]  # that may follow it
    takes: bool  # something follows it
    told: str


@dataclass(frozen=True, slots=True)
class CommandCompletions:
    """What may follow `teraio` and these words."""

    path: tuple[str, ...]
    commands: tuple[tuple[str, str], ...]  # with what is told of them
    flags: tuple[Flag, ...]
    words: tuple[str, ...]  # of its arguments


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
    """This parser, and those of its commands."""
    flags, words = [], list[str]()
    commands: dict[str, argparse.ArgumentParser] = {}
    told: list[tuple[str, str]] = []
    for action in parser._actions:
        choices = action.choices or ()
        if isinstance(action, argparse._SubParsersAction):
            commands = dict(action.choices)
            told = [(each.dest, each.help or "") for each in action._choices_actions]
        elif action.help == argparse.SUPPRESS:
            continue
        elif action.option_strings:
            takes = action.nargs != 0
            names = tuple(action.option_strings)
            flags.append(Flag(names, tuple(map(str, choices)), takes, action.help or ""))
        else:
            words += map(str, choices)
    yield CommandCompletions(path, tuple(told), tuple(flags), tuple(words))
    for name, command in commands.items():
        yield from completions_of_commands(command, (*path, name))


def bash_script(found: list[CommandCompletions]) -> str:
    """One function: how deep in commands are we, and what may come there. Files wherever no word is known."""
    cases, values = [], []
    for level in found:
        key = " ".join(("teraio", *level.path))
        names = [name for flag in level.flags for name in flag.names]
        then = [*(name for name, _ in level.commands), *level.words]
        cases.append(f'    "{key}") flags="{" ".join(names)}"; words="{" ".join(then)}" ;;')
        for flag in level.flags:
            if flag.words:
                values += [
                    f'    "{key} {name}") words="{" ".join(flag.words)}"; only=1 ;;' for name in flag.names
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
        here = seen + [f"not __fish_seen_subcommand_from {' '.join(names)}"] * bool(names)
        when = f" -n {_quote_for_fish('; and '.join(here))}" if here else ""
        for name, told in level.commands:
            lines.append(f"complete -c teraio{when} -f -a {name} -d {_quote_for_fish(told)}")
        if level.words:
            lines.append(f"complete -c teraio{when} -f -a {_quote_for_fish(' '.join(level.words))}")
        for flag in level.flags:
            lines.append(f"complete -c teraio{when}{_fish_arguments_of_flag(flag)}")
    return "\n".join(lines)


def _fish_arguments_of_flag(flag: Flag) -> str:
    names = "".join(f" -l {n[2:]}" if n.startswith("--") else f" -s {n[1:]}" for n in flag.names)
    follows = f" -x -a {_quote_for_fish(' '.join(flag.words))}" if flag.words else " -r" * flag.takes
    return f"{names}{follows} -d {_quote_for_fish(flag.told)}"


def _quote_for_fish(text: str) -> str:
    """For fish, on one line; argparse writes `%%` for a percent sign."""
    line = re.sub(r"\s+", " ", text).replace("%%", "%")
    return "'" + line.replace("\\", "\\\\").replace("'", "\\'") + "'"
