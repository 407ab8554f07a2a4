"""Profiles and machines that come with teraio. Each command that reads such a file accepts its name instead
of a path.

    find_named_file("rtx4090-1ssd", MACHINES)     -> the path of the shipped file
    find_named_file("mine.json", MACHINES)        -> mine.json

If a file of the given name exists, it has priority over a shipped file. This module contains some figures of
the profiles, because reading all profiles takes seconds. A test compares these figures with the files.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from teraio.errors import FileFormatError
from teraio.formats.fields import suggest_nearest_name
from teraio.formats.machine import Machine
from teraio.formats.profile import Profile
from teraio.units import printable_line

FOLDER = Path(__file__).parents[1] / "profiles"


@dataclass(frozen=True, slots=True)
class ShippedFiles:
    """Shipped files of one kind: profiles or machines.

    `list_command` is the command that lists them. `make_hint` explains how users make such a file themselves.
    """

    kind: str
    folder: Path
    suffix: str
    list_command: str
    make_hint: str

    def names(self) -> list[str]:
        """List the names of the files, without the suffix that all of them have."""
        return sorted(file.name.removesuffix(self.suffix) for file in self.folder.glob("*" + self.suffix))

    def path_of(self, name: str) -> Path:
        """Return the path of the shipped file with this name."""
        return self.folder / f"{name}{self.suffix}"


PROFILES = ShippedFiles(
    "profile",
    FOLDER,
    ".profile.json.gz",
    "teraio profile list",
    "options={'profile': 'run.profile.json'} measures your own",
)
MACHINES = ShippedFiles(
    "machine",
    FOLDER / "machines",
    ".machine.json",
    "teraio machine list",
    "`teraio doctor -o here.machine.json` measures your own",
)


@dataclass(frozen=True, slots=True)
class ProfileFacts:
    """Figures of a shipped profile. Commands print them without reading the profile."""

    what: str
    compute_ns: int
    peak_bytes: int  # the peak memory of a step without evictions
    smallest_bytes: int  # the smallest budget for which a plan exists


ABOUT_PROFILES = {
    "gpt2-b16": ProfileFacts("GPT-2, 16 sequences", 41937191, 6945385472, 617558016),
    "llama-3.1-70b-b8": ProfileFacts("Llama 3.1 70B, 8 sequences", 37343135702, 1714717327360, 16810770432),
    "llama-3.1-8b-b16": ProfileFacts("Llama 3.1 8B, 16 sequences", 8450856151, 410230259712, 9395765248),
    "llama-3.1-8b-b16-checkpoint": ProfileFacts(
        "the same, layers recomputed in the backward", 11065362135, 143665987584, 9395765248
    ),
    "llama-3.1-8b-b1x4-fp32": ProfileFacts(
        "Llama 3.1 8B in fp32, 4 micro-batches of 1", 18011343976, 165546196992, 8405385216
    ),
    "llama-3.1-8b-b2x8": ProfileFacts(
        "Llama 3.1 8B, 8 micro-batches of 2", 8483233015, 165564383232, 8405385216
    ),
    "llama-3.1-8b-b4": ProfileFacts("Llama 3.1 8B, 4 sequences", 2181231753, 187751399424, 8405385216),
    "llama-3.1-8b-l8-b4": ProfileFacts(
        "8 layers of Llama 3.1 8B, 4 sequences", 653718801, 59651457024, 8405385216
    ),
    "llama-cpu-160MiB": ProfileFacts(
        "a small Llama, measured on two CPU cores", 2301544870, 335544384, 51437632
    ),
    "qwen3-30b-a3b-b4": ProfileFacts("Qwen3 30B-A3B, 4 sequences", 1453363140, 544803332096, 6442450944),
    "qwen3-8b-b4": ProfileFacts("Qwen3 8B, 4 sequences", 2235166875, 198063159296, 9957277696),
    "vit-b-16-b256": ProfileFacts("ViT-B/16, 256 images", 85139182, 16594330240, 1006632960),
}

ABOUT_MACHINES = {
    "a100-80-4ssd": "a server with A100s, a GPU's share of it",
    "gb200-4ssd": "half of a GB200 superchip",
    "gh200-4ssd": "a Grace Hopper node",
    "h100-4ssd": "a server with H100s, a GPU's share of it",
    "h100-4ssd-nohost": "the same, drives alone",
    "h100-8ssd": "a server with H100s and twice the drives",
    "h100-8ssd-nohost": "the same, drives alone",
    "rtx4090-1ssd": "a PC: RTX 4090, 64 GB, one NVMe drive",
    "rtx4090-4ssd": "a workstation: RTX 4090, 128 GB, four drives",
    "teraio-paper": "half of the server of the TERAIO paper",
}


def find_named_file(
    name_or_path: str | os.PathLike[str], shipped: ShippedFiles, other_names: tuple[str, ...] = ()
) -> str:
    """Return the path of an existing file, or of the shipped file with this name.

    `other_names` are names that the caller accepts, too. The error for an unknown name lists them.
    """
    path = os.fspath(name_or_path)
    if not names_existing_file(path):
        name = path.removesuffix(shipped.suffix)
        if name in shipped.names():
            return str(shipped.path_of(name))
        if not os.path.lexists(path) and "\0" not in path:
            raise FileFormatError(_no_such_file_message(path, shipped, other_names))
    return path


def names_existing_file(path: str) -> bool:
    """Return True if the path exists and is not a folder."""
    return "\0" not in path and os.path.lexists(path) and not os.path.isdir(path)


def read_named_machine(name_or_path: str | os.PathLike[str]) -> Machine:
    """Read a machine file, or the shipped machine with this name."""
    return Machine.read(find_named_file(name_or_path, MACHINES))


def read_named_profile(name_or_path: str | os.PathLike[str]) -> Profile:
    """Read a profile file, or the shipped profile with this name."""
    return Profile.read(find_named_file(name_or_path, PROFILES))


def _no_such_file_message(path: str, shipped: ShippedFiles, other_names: tuple[str, ...]) -> str:
    names = [*shipped.names(), *other_names]
    ending = re.compile(rf"(\.{shipped.kind})?\.json(\.gz)?$")
    base = ending.sub("", os.path.basename(path))
    guess = suggest_nearest_name(base, names)
    start = f"{printable_line(path, 200)}: No such file"
    if os.sep in path or base != path:
        return f"{start}{guess}; names that need no file: {shipped.list_command}"
    return (
        f"{start}, and no {shipped.kind} of that name comes with teraio{guess}; "
        f"there are {', '.join(names)} ({shipped.list_command}), and {shipped.make_hint}"
    )
