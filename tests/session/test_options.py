"""Tests of options: a dict, the environment and flags give the same value, and errors name the accepted
forms."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from fractions import Fraction
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import teraio
from teraio.errors import OptionError
from teraio.options import (
    PLANNERS,
    SMALLEST,
    Memory,
    Settings,
    add_flags,
    env_name,
    flag_name,
    is_disabled,
    options_table,
    settings_from_flags,
)

NAMES = [field.name for field in dataclasses.fields(Settings)]

# Every option has at least one row: (name of the option, value as text, parsed value).
GOOD: list[tuple[str, str, Any]] = [
    ("memory", "20GiB", Memory(20 * 2**30)),
    ("memory", "80%", Memory(percent=Fraction(80))),
    ("memory", "12.5 %", Memory(percent=Fraction(25, 2))),
    ("memory", "min", Memory()),
    ("host_memory", "50%", Memory(percent=Fraction(50))),
    ("store", "/mnt/a", ("/mnt/a",)),
    ("store", f"/mnt/a{os.pathsep}/mnt/b", ("/mnt/a", "/mnt/b")),
    ("store", "null", ("null",)),
    ("store_size", "1TB", Memory(10**12)),
    ("warmup", "5", 5),
    ("inner", "eager", "eager"),
    ("mode", "max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"),
    ("inductor", "max_autotune=true,a.b=3,c=x", (("a.b", 3), ("c", "x"), ("max_autotune", True))),
    ("plan", "run.plan.json", "run.plan.json"),
    ("profile", "run.profile.json", "run.profile.json"),
    ("timeline", "run.timeline.json", "run.timeline.json"),
    ("planner", "greedy", "greedy"),
    ("planner", "zero-infinity", "zero-infinity"),
    ("plan_time", "10s", 10**10),
    ("planning", "inline", "inline"),
    ("optimizer_step", "host", "host"),
    ("updates", "late", "late"),
    ("recompute", "auto", "auto"),
    ("keep", "*.embed.*", ("*.embed.*",)),
    ("keep", "*.embed.*, lm_head.*", ("*.embed.*", "lm_head.*")),
    ("max_write_per_day", "2TB/day", 2 * 10**12),
    ("checksum", "off", False),
    ("on_fallback", "error", "error"),
]


def test_the_typed_form_has_every_option_and_every_word() -> None:
    hints = get_type_hints(teraio.Options.__init__)
    assert list(hints) == [*NAMES, "return"]
    words = {name: re.findall(r"'([^']+)'", str(hints[name])) for name in NAMES}
    for field in dataclasses.fields(Settings):
        for word in words[field.name]:
            assert field.metadata["parse"](word) is not None
    assert tuple(words["planner"]) == PLANNERS and words["recompute"] and words["inner"]
    assert teraio.Options(warmup=2) == {"warmup": 2} and teraio.Options() == {}


def test_every_option_has_a_good_example() -> None:
    assert {name for name, _, _ in GOOD} == set(NAMES)


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_dict_environment_and_flag_give_the_same_value(name: str, text: str, value: Any) -> None:
    by_dict = Settings.parse({name: text}, {})
    by_environment = Settings.parse({}, {env_name(name): text})
    parser = argparse.ArgumentParser()
    add_flags(parser, NAMES)
    by_flag = settings_from_flags(parser.parse_args([flag_name(name), text]), {})
    assert getattr(by_dict, name) == value
    assert by_dict == by_environment == by_flag
    # If a parsed value is parsed again, the result is equal.
    if name != "plan_time":  # a number without a unit means seconds, but the parsed value is in nanoseconds
        assert Settings.parse({name: getattr(by_dict, name)}, {}) == by_dict
    assert by_dict.cache_key() == by_environment.cache_key() != Settings().cache_key()
    assert hash(by_dict) == hash(by_flag)


BAD: list[tuple[dict[Any, Any], str]] = [
    ({"memry": "1GiB"}, "option 'memry' is unknown; did you mean memory?; options are memory, host_memory"),
    ({"Memory": "1GiB"}, "did you mean memory?"),
    ({"\x1b[2J": 1}, r"option '\x1b[2J' is unknown"),
    ({3: 1}, "option '3' is unknown"),
    ({"memory": "20G"}, "option 'memory': '20G' has an unknown unit 'G'"),
    ({"memory": "0%"}, "'0%' is not a percentage above 0% and up to 100%"),
    ({"memory": "101%"}, "accepted are 20GiB, 80% and min"),
    ({"memory": 0}, "'0' is zero"),
    ({"memory": 0.8}, "accepted are 20GiB, 80% and min"),
    ({"memory": True}, "accepted are 20GiB, 80% and min"),
    ({"store_size": "min"}, "option 'store_size': 'min' is not"),
    ({"store_size": SMALLEST}, "option 'store_size': 'min' is not"),
    ({"store": ""}, "is not the path of a file or directory"),
    ({"store": "a\0b"}, "is not the path of a file or directory"),
    ({"store": 5}, "is not the path of a file or directory"),
    ({"warmup": 0}, "'0' is not a whole number from 1 to 1000"),
    ({"warmup": 2.5}, "'2.5' is not a whole number"),
    ({"warmup": True}, "'True' is not a whole number"),
    ({"inner": "inductr"}, "is not one of inductor, eager; did you mean inductor?"),
    ({"inner": ["eager"]}, "is not one of inductor, eager"),
    ({"mode": "x; y"}, "is not a name"),
    ({"inductor": "fast"}, "is not of the form name=value"),
    ({"inductor": {"a": [1]}}, "expected a bool, a number or a string"),
    ({"inductor": 5}, "is neither a dict nor"),
    ({"planner": "gredy"}, "did you mean greedy?"),
    ({"plan_time": "0s"}, "is zero; expected a duration"),
    ({"plan_time": "5 weeks"}, "unknown unit 'weeks'"),
    ({"plan_time": float("nan")}, "is not a duration"),
    ({"keep": [1]}, "is not a list of name globs"),
    ({"keep": 5}, "is not a list of name globs"),
    ({"keep": "a,,b"}, "'a,,b' is not a list of name globs"),
    ({"max_write_per_day": "2TB/hour"}, "is not a size"),
    ({"checksum": "maybe"}, "'maybe' is not one of on, off"),
    ({"on_fallback": "ignore"}, "is not one of warn, error"),
    ({"inner": "eager", "mode": "default"}, "option 'mode' is for Inductor, but inner is 'eager'"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[message for _, message in BAD])
def test_a_wrong_value_is_refused_with_the_accepted_forms(given: dict[Any, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        Settings.parse(given, {})
    line = str(error.value)
    assert message in line and line.isprintable() and len(line) < 700


def test_a_dict_wins_over_the_environment_and_empty_means_unset() -> None:
    environ = {"TERAIO_MEMORY": "1GiB", "TERAIO_WARMUP": "", "TERAIO_PLANNER": " "}
    assert Settings.parse({"memory": "2GiB"}, environ).memory == Memory(2 * 2**30)
    assert Settings.parse({"memory": None}, environ).memory == Memory(2**30)
    assert Settings.parse({}, environ).warmup == 3
    with pytest.raises(OptionError, match=r"^TERAIO_MEMORY: 'much'"):
        Settings.parse({}, {"TERAIO_MEMORY": "much"})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAIO_WARMUP", "7")
    assert Settings.parse().warmup == 7


def test_memory_becomes_bytes() -> None:
    assert Memory(5).resolve(100, 40) == 5
    assert Memory(percent=Fraction(80)).resolve(101, 40) == 80
    assert Memory().resolve(100, 40) == 40
    assert [str(Memory(5)), str(Memory(percent=Fraction(25, 2))), str(Memory())] == ["5B", "12.5%", "min"]


def test_a_cache_key_has_all_options_or_only_program_options() -> None:
    some = Settings.parse({"memory": "2GiB", "inner": "eager"}, {})
    assert some.cache_key() == "memory=2147483648B inner='eager'"
    assert some.cache_key(program_only=True) == "inner='eager'"
    assert Settings().cache_key() == "defaults"
    inductor = [
        Settings.parse({"inductor": order}, {}).cache_key() for order in ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    ]
    assert inductor[0] == inductor[1]


def test_paths_and_lists_may_be_python_objects(tmp_path: Path) -> None:
    some = Settings.parse(
        {"store": [tmp_path, "~/x"], "profile": tmp_path / "p.json", "keep": ("a", "b")}, {}
    )
    assert some.store == (str(tmp_path), os.path.expanduser("~/x"))
    assert some.profile == str(tmp_path / "p.json")
    assert Settings.parse({"plan_time": 2.5}, {}).plan_time == 2_500_000_000  # seconds -> nanoseconds
    parser = argparse.ArgumentParser()
    add_flags(parser, ["keep", "memory"])
    assert settings_from_flags(parser.parse_args(["--keep", "a", "--keep", "b"]), {}).keep == ("a", "b")
    assert "--memory" in parser.format_help() and "--store" not in parser.format_help()


def test_teraio_disable_selects_the_plain_backend() -> None:
    assert (
        not is_disabled({})
        and not is_disabled({"TERAIO_DISABLE": ""})
        and not is_disabled({"TERAIO_DISABLE": "0"})
    )
    assert is_disabled({"TERAIO_DISABLE": "1"})
    with pytest.raises(OptionError, match="TERAIO_DISABLE"):
        is_disabled({"TERAIO_DISABLE": "perhaps"})


def test_the_options_table_describes_each_option() -> None:
    rows = options_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == NAMES
    for field, row in zip(dataclasses.fields(Settings), rows, strict=True):
        assert field.metadata["doc"] and row.count(" | ") == 4
