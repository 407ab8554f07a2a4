"""Options. One dataclass field defines an option's key (`options={"memory": …}`), variable, flag (`--memory`)
and docs.

In: a dict, an environment or a parsed command line. Out: a frozen, hashable `Settings`. Only this module
parses the values of options. All other modules receive checked bytes, nanoseconds and words.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field as DataField
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, Literal

from teraio import switches
from teraio.errors import OptionError
from teraio.formats.fields import suggest_nearest_name
from teraio.units import DURATIONS, SIZES, parse_bytes, parse_ns, printable_line

PLANNERS = ("auto", "none", "greedy", "search", "ilp", "zero-infinity", "g10", "teraio-paper", "10cache")


@dataclass(frozen=True, slots=True)
class Memory:
    """An amount of memory: a number of bytes or a percentage.

    If `size_bytes` and `percent` are None, the amount is `min`, the smallest that works.
    """

    size_bytes: int | None = None
    percent: Fraction | None = None

    def resolve(self, available_bytes: int, smallest_bytes: int) -> int:
        """Return the amount in bytes. A percentage is a part of `available_bytes`, and `min` is
        `smallest_bytes`.
        """
        if self.size_bytes is not None:
            return self.size_bytes
        return smallest_bytes if self.percent is None else int(available_bytes * self.percent / 100)

    def __str__(self) -> str:
        """Return the amount as a text from which parsing gives the same amount."""
        if self.size_bytes is not None:
            return f"{self.size_bytes}B"
        return "min" if self.percent is None else f"{float(self.percent):g}%"


# Environment variables that are not options.
VARIABLES = {
    "TERAIO_DISABLE": "`1`: run the same programs without teraio, for comparison",
    switches.VARIABLE: "features to turn off, joined by `,`: "
    + ", ".join(f"`{name}`" for name in switches.FEATURES)
    + "; the computed numbers do not change",
    "TERAIO_LOG": "the lowest level of log lines: `debug`, `info`, `warning`, `error`, `off`",
    "TERAIO_CACHE_DIR": "the folder of plans for later runs, or `off`; default: the user's cache",
    "TERAIO_RUN": "set by `teraio run` for the processes that it starts; not for users",
}

SMALLEST = Memory()
NULL_STORE = "null"
Scalar = bool | int | float | str


def _parse_amount(value: Any) -> Memory:
    """Parse `20GiB`, `80%` or a number of bytes, but not `min`."""
    if isinstance(value, Memory):
        return value
    if isinstance(value, str) and value.strip().endswith("%"):
        match = re.fullmatch(r"([0-9]{1,3})(?:\.([0-9]{1,2}))?\s*%", value.strip(), re.ASCII)
        percent = Fraction(f"{match[1]}.{match[2] or 0}") if match else Fraction(0)
        if not 0 < percent <= 100:
            raise ValueError(f"'{printable_line(value)}' is not a percentage above 0% and up to 100%")
        return Memory(percent=percent)
    number = parse_bytes(value)
    if not number:
        raise ValueError(f"'{printable_line(value)}' is zero; expected more than 0 bytes")
    return Memory(number)


def _parse_memory(value: Any) -> Memory:
    if isinstance(value, str) and value.strip().lower() == "min":
        return SMALLEST
    try:
        return _parse_amount(value)
    except ValueError as error:
        raise ValueError(f"{error}; accepted are 20GiB, 80% and min") from None


def _parse_store_size(value: Any) -> Memory:
    share = _parse_amount(value)
    if share == SMALLEST:
        raise ValueError(f"'min' is not {SIZES} or a percentage of the free space")
    return share


def _parse_bytes_per_day(value: Any) -> int:
    text = value.strip() if isinstance(value, str) else value
    return parse_bytes(text.removesuffix("/day") if isinstance(text, str) else text)


def _whole_number_parser(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        text = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
        if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or not low <= int(text) <= high:
            raise ValueError(f"'{printable_line(value)}' is not a whole number from {low} to {high}")
        return int(text)

    return parse


def _parse_duration_ns(value: Any) -> int:
    if isinstance(value, float) and 0 <= value < 10**6:
        return round(value * 10**9)
    number = parse_ns(value)
    if not number:
        raise ValueError(f"'{printable_line(value)}' is zero; expected {DURATIONS}")
    return number


def _word_parser(*words: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        word = value.strip().lower() if isinstance(value, str) else value
        if word not in words:
            raise ValueError(
                f"'{printable_line(value)}' is not one of {', '.join(words)}"
                f"{suggest_nearest_name(word, words)}"
            )
        return str(word)

    return parse


def _parse_switch(value: Any) -> bool:
    word = str(value).strip().lower() if isinstance(value, str | bool | int) else ""
    if word in ("on", "true", "1", "yes"):
        return True
    if word in ("off", "false", "0", "no"):
        return False
    raise ValueError(f"'{printable_line(value)}' is not one of on, off")


def _parse_name(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", value.strip(), re.ASCII):
        raise ValueError(f"'{printable_line(value)}' is not a name of letters, digits and dashes")
    return value.strip()


def _parse_path(value: Any) -> str:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise ValueError(f"'{printable_line(value)}' is not the path of a file or directory")
    return os.path.expanduser(path)


def _parse_paths(value: Any) -> tuple[str, ...]:
    """Parse one path, several paths joined by `:` as in PATH, or a list of paths."""
    parts = value.split(os.pathsep) if isinstance(value, str) else value
    return tuple(map(_parse_path, parts if isinstance(parts, list | tuple) else [parts]))


def _parse_globs(value: Any) -> tuple[str, ...]:
    """Parse comma-separated name patterns such as `*.embed_tokens.*,lm_head.*`, or a list of such texts."""
    parts = [value] if isinstance(value, str) else value
    if isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts):
        globs = tuple(glob.strip() for part in parts for glob in part.split(","))
        if all(globs):
            return globs
    raise ValueError(
        f"'{printable_line(value)}' is not a list of name globs such as '*.embed_tokens.*,lm_head.*'"
    )


def _parse_name_value_pairs(value: Any) -> tuple[tuple[str, Scalar], ...]:
    """Parse a dict, or a text such as `max_autotune=true,shape_padding=false`. Return the pairs, sorted by
    name.
    """
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if not all(equals for _, equals, _ in pairs):
            raise ValueError(f"'{printable_line(value)}' is not of the form name=value,name=value")
        value = {name.strip(): _parse_scalar(text.strip()) for name, _, text in pairs}
    if isinstance(value, tuple):
        value = dict(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"'{printable_line(value)}' is neither a dict nor of the form name=value,name=value")
    for name, setting in value.items():
        if not isinstance(name, str) or not isinstance(setting, bool | int | float | str):
            raise ValueError(
                f"'{printable_line(name)}' is '{printable_line(setting)}'; expected a bool, a number "
                "or a string"
            )
    return tuple(sorted(value.items()))


def _parse_scalar(text: str) -> Scalar:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _option_field(
    parse: Callable[[Any], Any], doc: str, default: Any = None, *, program: bool = False, many: bool = False
) -> Any:
    """Return the dataclass field of an option.

    `program` is True if the option changes compiled programs. `many` is True if the option's flag may be
    repeated.
    """
    return field(default=default, metadata={"parse": parse, "doc": doc, "program": program, "many": many})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The user's options after the check of their values.

    None means that the user gave no value. Then the module that needs the option chooses a value.
    """

    memory: Memory | None = _option_field(  # noqa: RUF009
        _parse_memory,
        "budget of device memory: `20GiB`, `80%` of the default, or `min` for the smallest that works; "
        "default: 95 % of the memory available on a GPU, 90 % on a CPU. On a CPU, the "
        "ranks of a host share this memory",
    )
    host_memory: Memory | None = _option_field(  # noqa: RUF009
        _parse_memory,
        "with a GPU: limit of host memory for evicted tensors: `64GiB`, `80%` of the available host memory, "
        "or `min` for none; default: half of it. The ranks of a host share it. Pinned memory exceeds "
        "the used memory by at most 1 GiB",
    )
    store: tuple[str, ...] = _option_field(
        _parse_paths,
        f"directories on the SSDs, joined by `{os.pathsep}`. Default: in the user's cache or the temporary "
        f"folder, on the disk with more free space. `{NULL_STORE}` keeps evicted tensors in RAM, to test "
        "whether a drive is at fault",
        (),
    )
    store_size: Memory | None = _option_field(  # noqa: RUF009
        _parse_store_size,
        "limit of the store's size: `500GiB`, or `80%` of the free space. The ranks of a host share it",
    )
    warmup: int = _option_field(_whole_number_parser(1, 1000), "measured steps before planning", 3)
    inner: str = _option_field(
        _word_parser("inductor", "eager"), "inner program: `inductor` or `eager`", "inductor", program=True
    )
    mode: str | None = _option_field(
        _parse_name, "Inductor's mode, such as `max-autotune-no-cudagraphs`", program=True
    )
    inductor: tuple[tuple[str, Scalar], ...] = _option_field(
        _parse_name_value_pairs, "Inductor's options: a dict, or `name=value,name=value`", (), program=True
    )
    plan: str | None = _option_field(_parse_path, "replay this plan file")
    profile: str | None = _option_field(_parse_path, "write the measured profile to this file")
    timeline: str | None = _option_field(_parse_path, "write the measured timeline to this file")
    planner: str = _option_field(
        _word_parser(*PLANNERS), f"the planner: {', '.join(f'`{name}`' for name in PLANNERS)}", "auto"
    )
    plan_time: int = _option_field(
        _parse_duration_ns, "time limit of the planner: `10s`, `2min`, or seconds", 30 * 10**9
    )
    planning: str = _option_field(
        _word_parser("process", "inline"),
        "where the planner runs: `process`, in a process of its own while steps go on, or `inline`: the next "
        "step waits for the plan",
        "process",
    )
    optimizer_step: str = _option_field(
        _word_parser("auto", "device", "host"),
        "where the optimizer computes: `device`, `host` (with a GPU), or `auto` for the faster one",
        "device",
    )
    updates: str = _option_field(
        _word_parser("step", "late", "backward", "auto"),
        "when the optimizer's updates run: `step`, at `step()`; `late`, in the next forward, just before the "
        "weights are used; `auto`: late if measured steps are then faster. `backward`: as soon as gradients "
        "are final; then no code may use weights or gradients before `step()`",
        "auto",
    )
    recompute: str = _option_field(
        _word_parser("off", "auto"),
        "recompute activations instead of moving them: `off`, `auto`",
        "off",
        program=True,
    )
    keep: tuple[str, ...] = _option_field(
        _parse_globs, "name globs of tensors that never move, joined by `,`", (), many=True
    )
    max_write_per_day: int | None = _option_field(
        _parse_bytes_per_day, "cap on bytes written to the SSDs: `2TB`, `500GiB/day`"
    )
    checksum: bool = _option_field(
        _parse_switch, "verify the checksums of bytes read from the store: `on`, `off`", True
    )
    on_fallback: str = _option_field(
        _word_parser("warn", "error"), "reaction to a slower path: `warn` once, or `error`", "warn"
    )

    @property
    def store_directories(self) -> tuple[str, ...]:
        """Return the directories that the user gave. Return () for the default store, and for the store in
        memory (`null`).
        """
        return () if self.store == (NULL_STORE,) else self.store

    @classmethod
    def parse(
        cls, mapping: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
    ) -> Settings:
        """Parse options. A value in the dict has priority over the environment, which has priority over the
        default.

        For a wrong value, raise OptionError with the option's name and the accepted forms.
        """
        mapping, environ = mapping or {}, os.environ if environ is None else environ
        options = {f.name: f for f in fields(cls)}
        for key in mapping:
            if key not in options:
                known = f"options are {', '.join(options)}"
                raise OptionError(
                    f"option '{printable_line(key)}' is "
                    f"unknown{suggest_nearest_name(key, list(options))}; {known}"
                )
        values = {}
        for name, option in options.items():
            if mapping.get(name) is not None:
                values[name] = _parse_option_value(option, mapping[name], f"option {name!r}")
            elif environ.get(env_name(name), "").strip():
                values[name] = _parse_option_value(option, environ[env_name(name)], env_name(name))
        return cls(**values)._refuse_contradictions()

    def _refuse_contradictions(self) -> Settings:
        if self.inner == "eager" and (self.mode or self.inductor):
            name = "mode" if self.mode else "inductor"
            raise OptionError(f"option {name!r} is for Inductor, but inner is 'eager'; leave one of them out")
        return self

    def cache_key(self, *, program_only: bool = False) -> str:
        """Return a stable, readable key for caches. Equal options give equal keys.

        If `program_only`, use only options that change compiled programs. Options with default values are not
        in the key, because a default changes only with the version of teraio.
        """
        parts = []
        for option in fields(self):
            value = getattr(self, option.name)
            if value != option.default and (option.metadata["program"] or not program_only):
                parts.append(f"{option.name}={value if isinstance(value, Memory) else repr(value)}")
        return " ".join(parts) or "defaults"


FIELDS = frozenset(f.name for f in fields(Settings))


class Options(dict[str, Any]):
    """Options for `torch.compile(model, backend="teraio", options=...)`, with names and types that editors
    complete: `teraio.Options(memory="20GiB")` is the dict `{"memory": "20GiB"}`.
    """

    def __init__(
        self,
        *,
        memory: str | int | None = None,
        host_memory: str | int | None = None,
        store: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        store_size: str | int | None = None,
        warmup: int | str | None = None,
        inner: Literal["inductor", "eager"] | None = None,
        mode: str | None = None,
        inductor: Mapping[str, Scalar] | str | None = None,
        plan: str | os.PathLike[str] | None = None,
        profile: str | os.PathLike[str] | None = None,
        timeline: str | os.PathLike[str] | None = None,
        planner: Literal[
            "auto", "none", "greedy", "search", "ilp", "zero-infinity", "g10", "teraio-paper", "10cache"
        ]
        | None = None,
        plan_time: str | int | float | None = None,
        planning: Literal["process", "inline"] | None = None,
        optimizer_step: Literal["auto", "device", "host"] | None = None,
        updates: Literal["step", "late", "backward", "auto"] | None = None,
        recompute: Literal["off", "auto"] | None = None,
        keep: str | Sequence[str] | None = None,
        max_write_per_day: str | int | None = None,
        checksum: bool | Literal["on", "off"] | None = None,
        on_fallback: Literal["warn", "error"] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in FIELDS and value is not None}
        super().__init__(given)


def _parse_option_value(option: DataField[Any], value: Any, name: str) -> Any:
    try:
        return option.metadata["parse"](value)
    except (ValueError, TypeError) as error:
        raise OptionError(f"{name}: {error}") from None


def env_name(name: str) -> str:
    """Return the environment variable of an option: `store_size` -> `TERAIO_STORE_SIZE`."""
    return f"TERAIO_{name.upper()}"


def flag_name(name: str) -> str:
    """Return the flag of an option: `store_size` -> `--store-size`."""
    return f"--{name.replace('_', '-')}"


def is_disabled(environ: Mapping[str, str] | None = None) -> bool:
    """Return True if the environment variable `TERAIO_DISABLE` turns teraio off.

    The model is then compiled by the inner backend alone.
    """
    value = (os.environ if environ is None else environ).get("TERAIO_DISABLE", "").strip()
    try:
        return bool(value) and _parse_switch(value)
    except ValueError as error:
        raise OptionError(f"TERAIO_DISABLE: {error}") from None


def add_flags(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Add the flags of the options in `names` to a parser. `settings_from_flags` reads the parsed flags."""
    options = {f.name: f for f in fields(Settings)}
    for name in names:
        meta = options[name].metadata
        action = "append" if meta["many"] else "store"
        doc = meta["doc"].replace("`", "").replace("%", "%%")
        parser.add_argument(flag_name(name), dest=name, action=action, default=None, metavar="X", help=doc)


def settings_from_flags(namespace: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of a parsed command line. A flag has priority over the option's environment
    variable.
    """
    given = {
        f.name: value for f in fields(Settings) if (value := getattr(namespace, f.name, None)) is not None
    }
    return Settings.parse(given, environ)


def options_table() -> str:
    """Return a Markdown table of all options, for the docs."""
    rows = ["| option | environment | flag | default | meaning |", "|---|---|---|---|---|"]
    for f in fields(Settings):
        doc = f.metadata["doc"].replace("|", "\\|")
        rows.append(
            f"| `{f.name}` | `{env_name(f.name)}` | `{flag_name(f.name)}` | {_default_as_markdown(f)} "
            f"| {doc} |"
        )
    return "\n".join(rows) + "\n"


def _default_as_markdown(option: DataField[Any]) -> str:
    match option.default:
        case bool(switch):
            return "`on`" if switch else "`off`"
        case int(number) if option.metadata["parse"] is _parse_duration_ns:
            return f"`{number // 10**9}s`"
        case None | ():
            return ""
        case default:
            return f"`{default}`"
