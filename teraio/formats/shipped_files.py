"""Profiles and machines that come with teraio: their names are taken wherever such a file is read.

    path("rtx4090-1ssd", MACHINES)     -> the file that came along
    path("mine.json", MACHINES)        -> that file

A file that is there goes first. Figures of profiles are written down here, because to read all of the files
takes seconds; a test holds them to the files.
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
    """Files of one kind. `listed`: the command that lists them; `made`: the one that makes another."""

    kind: str
    folder: Path
    suffix: str
    listed: str
    made: str

    def names(self) -> list[str]:
        """Lists the names, without what all files end with."""
        return sorted(file.name.removesuffix(self.suffix) for file in self.folder.glob("*" + self.suffix))

    def path_of(self, name: str) -> Path:
        """Names the file of a name."""
        return self.folder / f"{name}{self.suffix}"


PROFILES = ShippedFiles(
    "profile",
    FOLDER,
    ".profile.json.gz",
    "teraio profile list",
    "options={'profile': 'run.profile.json'} measures one",
)
MACHINES = ShippedFiles(
    "machine",
    FOLDER / "machines",
    ".machine.json",
    "teraio machine list",
    "`teraio doctor -o here.machine.json` measures this one",
)


@dataclass(frozen=True, slots=True)
class ProfileFacts:
    """What is known of a profile without reading it."""

    what: str
    compute_ns: int
    peak_bytes: int  # if nothing moves
    smallest_bytes: int  # that there is a plan for


ABOUT_PROFILES = {
    "gpt2-b16": ProfileFacts("GPT-2, 16 sequences", 41937191, 6945385472, 617558016),
    "llama-3.1-70b-b8": ProfileFacts("Llama 3.1 70B, 8 sequences", 37343135702, 1714717327360, 16810770432),
    "llama-3.1-8b-b16": ProfileFacts("Llama 3.1 8B, 16 sequences", 8450856151, 410230259712, 9395765248),
    "llama-3.1-8b-b16-checkpoint": ProfileFacts(
        "the same, layers run once more in the backward", 11065362135, 143665987584, 9395765248
    ),
    "llama-3.1-8b-b1x4-fp32": ProfileFacts(
        "Llama 3.1 8B in fp32, 4 micro-batches of 1", 18011343976, 165546196992, 8405385216
    ),
    "llama-3.1-8b-b2x8": ProfileFacts(
        "Llama 3.1 8B, 8 micro-batches of 2", 8483233015, 165564383232, 8405385216
    ),
    "llama-3.1-8b-b4": ProfileFacts("Llama 3.1 8B, 4 sequences", 2181231753, 187751399424, 8405385216),
    "llama-3.1-8b-l8-b4": ProfileFacts("8 layers of it, 4 sequences", 653718801, 59651457024, 8405385216),
    "llama-cpu-160MiB": ProfileFacts(
        "a small Llama, measured on two CPU cores", 2301544870, 335544384, 51437632
    ),
    "qwen3-30b-a3b-b4": ProfileFacts("Qwen3 30B-A3B, 4 sequences", 1453363140, 544803332096, 6442450944),
    "qwen3-8b-b4": ProfileFacts("Qwen3 8B, 4 sequences", 2235166875, 198063159296, 9957277696),
    "vit-b-16-b256": ProfileFacts("ViT-B/16, 256 images", 85139182, 16594330240, 1006632960),
}

ABOUT_MACHINES = {
    "a100-80-4ssd": "a server with A100s, a GPU's share of it",
    "gh200-4ssd": "a Grace Hopper node",
    "h100-4ssd": "a server with H100s, a GPU's share of it",
    "h100-4ssd-nohost": "the same, drives alone",
    "h100-8ssd": "a server with H100s and twice the drives",
    "h100-8ssd-nohost": "the same, drives alone",
    "rtx4090-1ssd": "a PC: RTX 4090, 64 GB, one NVMe drive",
    "teraio-paper": "half of the server of the TERAIO paper",
}


def find_named_file(asked: str | os.PathLike[str], shelf: ShippedFiles, others: tuple[str, ...] = ()) -> str:
    """Finds the file that is meant. `others`: what else would have been taken, for the error."""
    told = os.fspath(asked)
    if not names_existing_file(told):
        name = told.removesuffix(shelf.suffix)
        if name in shelf.names():
            return str(shelf.path_of(name))
        if not os.path.lexists(told) and "\0" not in told:
            raise FileFormatError(_no_such_file_message(told, shelf, others))
    return told


def names_existing_file(asked: str) -> bool:
    """Whether it is there; a folder is no file of ours."""
    return "\0" not in asked and os.path.lexists(asked) and not os.path.isdir(asked)


def read_named_machine(asked: str | os.PathLike[str]) -> Machine:
    """Reads a machine file, or the one that came along under this name."""
    return Machine.read(find_named_file(asked, MACHINES))


def read_named_profile(asked: str | os.PathLike[str]) -> Profile:
    """Reads a profile, or the one that came along under this name."""
    return Profile.read(find_named_file(asked, PROFILES))


def _no_such_file_message(asked: str, shelf: ShippedFiles, others: tuple[str, ...]) -> str:
    names = [*shelf.names(), *others]
    ending = re.compile(rf"(\.{shelf.kind})?\.json(\.gz)?$")
    base = ending.sub("", os.path.basename(asked))
    meant = suggest_nearest_name(base, names)
    if os.sep in asked or base != asked:
        return f"{printable_line(asked, 200)}: No such file{meant}; names that need no file: {shelf.listed}"
    return (
        f"{printable_line(asked, 200)}: No such file, and no {shelf.kind} of that name comes with "
        f"teraio{meant}; "
        f"there are {', '.join(names)} ({shelf.listed}), and {shelf.made}"
    )
