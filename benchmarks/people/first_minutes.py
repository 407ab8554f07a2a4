"""The first minutes of someone new, from README: a new clone, a new environment, the demo, a model of one's
own, and what the commands say of it. All is run now, and what it printed becomes docs/first-minutes.md.

    python benchmarks/people/first_minutes.py [--out docs/first-minutes.md]

About eight minutes on two cores. Long lines and outputs are cut, which "..." says. Ends with status 1 when
a command fails, or when the losses with a budget, without one and of the replay are not the same lines.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 110

MINE = """\
import sys
import torch
from torch import nn

OPTIONS = {"memory": "100MiB", "timeline": "run.timeline.json", "profile": "run.profile.json"}


def make():
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
    return nn.Sequential(*[block() for _ in range(8)])


if __name__ == "__main__":
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"memory": "100MiB", "plan": sys.argv[1]} if sys.argv[1:] else OPTIONS
    compiled = torch.compile(model, backend="teraio", options=options)
    for step in range(8):
        x = torch.randn(1024, 512)
        loss = nn.functional.mse_loss(compiled(x), x.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item())
"""
FITS = """\
import torch, teraio
from torch import nn
from mine import make

x = torch.randn(1024, 512)
print(teraio.estimate(make(), x, "100MiB", loss=lambda out: nn.functional.mse_loss(out, x.flip(1))))
"""
GIVEN = "run.profile.json --machine here.machine.json"


@dataclass
class Scene:
    title: str
    commands: tuple[str, ...]
    seen: str  # what one takes from it
    files: dict[str, str] = field(default_factory=dict)
    head: int = 40
    tail: int = 0
    in_clone: bool = False


def set_up_commands() -> tuple[str, ...]:
    """The two that README gives."""
    block = re.search(r"## Set up.*?```bash\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert block is not None, "README.md has no block of commands under 'Set up'"
    return tuple(block[1].strip().splitlines())


SCENES = (
    Scene("Set up", set_up_commands(), "Two commands, as README has them.", head=0, tail=1, in_clone=True),
    Scene(
        "The demo",
        ("python -m teraio demo",),
        "The same losses in a third of the memory.",
        in_clone=True,
    ),
    Scene(
        "A model of my own, within 100 MiB",
        ("python mine.py",),
        "One argument in `torch.compile`; the loop is as it was.",
        {"mine.py": MINE},
    ),
    Scene(
        "The same without teraio", ("TERAIO_DISABLE=1 python mine.py",), "The same losses, to the last digit."
    ),
    Scene(
        "What happened, in letters",
        ("teraio report run.timeline.json --profile run.profile.json",),
        "Memory over the step, what every lane carried, what was waited for and why.",
        head=36,
        tail=3,
    ),
    Scene(
        "The same as a page",
        ("teraio report run.timeline.json --profile run.profile.json -o report.html",),
        "One file, for a browser; [Reports](reports.md) shows it.",
    ),
    Scene(
        "What this machine does",
        ("teraio doctor -o here.machine.json",),
        "What is usable, and how fast it is.",
    ),
    Scene(
        "All planners, on that profile",
        (f"teraio plan {GIVEN} --memory 100MiB --planner all -o run.plan.json",),
        "No model and no training: the two files are enough. Those without a plan say why.",
    ),
    Scene(
        "What a step waits for, and what would help",
        (f"teraio explain run.plan.json {GIVEN}",),
        "What is waited for, which link is busy, and what a little more of each would bring.",
    ),
    Scene(
        "The plan, kernel by kernel",
        (f"teraio explain run.plan.json {GIVEN} --graph",),
        "What begins, and what is waited for, before each kernel.",
        head=20,
        tail=6,
    ),
    Scene(
        "How little memory would do",
        (f"teraio fit {GIVEN} --within 1.2",),
        "By simulation, for a fifth more time.",
    ),
    Scene(
        "That plan again",
        ("python mine.py run.plan.json",),
        "Followed from the second step on; nothing is measured, nothing is planned.",
    ),
    Scene(
        "Will it fit, before anything runs",
        ("python fits.py",),
        "From the model in code: times are a roofline, bytes are exact.",
        {"fits.py": FITS},
    ),
)


def cut(text: str, scene: Scene, home: Path) -> list[str]:
    text = text.replace(str(home), "~").replace(str(Path.home()), "~")
    text = text.replace(os.uname().release, os.uname().release.partition("-")[0])
    lines = [line.rstrip() for line in text.splitlines()]
    if len(lines) > scene.head + scene.tail:
        lines = [*lines[: scene.head], "...", *lines[len(lines) - scene.tail :]]
    return [line if len(line) <= WIDTH else f"{line[: WIDTH - 4]} ..." for line in lines]


def play(scene: Scene, home: Path) -> tuple[list[str], str]:
    """The page's lines, and what was printed."""
    where = home / "teraio" if scene.in_clone else home / "mine"
    for name, text in scene.files.items():
        (where / name).write_text(text, "utf-8")
    active = "" if scene.title == "Set up" else f". {home}/teraio/.venv/bin/activate && "
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TERAIO_", "VIRTUAL_ENV"))}
    environment |= {"HOME": str(home), "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor")}
    began_s = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", active + " && ".join(scene.commands)],
        cwd=where,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    took_s = time.monotonic() - began_s
    if done.returncode:
        sys.exit(f"{scene.title}: status {done.returncode}\n{done.stdout[-3000:]}")
    page = [f"## {scene.title}", ""]
    for name, text in scene.files.items():
        page += [f"`{name}`:", "", "```python", text.rstrip(), "```", ""]
    page += [
        "```",
        *(f"$ {command}" for command in scene.commands),
        *cut(done.stdout, scene, home),
        "```",
        "",
    ]
    took = f"{took_s:.0f} s" if took_s >= 1 else "Under a second"
    page += [f"{took}. {scene.seen}".rstrip(), ""]
    return page, done.stdout


def losses(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.fullmatch(r"\d+ \d+\.\d+", line)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "first-minutes.md")
    out = parser.parse_args().out
    page = [
        "# The first minutes",
        "",
        f"What someone new sees who has README and nothing else, on {os.cpu_count()} cores without a GPU,",
        f"recorded by `benchmarks/people/first_minutes.py` on {datetime.date.today()}, all of it new.",
        'Long lines and outputs are cut, with "...". [Start here](start.md) goes on from here.',
        "",
    ]
    printed: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="first-minutes-") as folder:
        home = Path(folder)
        (home / "mine").mkdir()
        subprocess.run(["git", "clone", "-q", str(ROOT), str(home / "teraio")], check=True)
        began_s = time.monotonic()
        for number, scene in enumerate(SCENES, 1):
            print(f"{number}/{len(SCENES)} {scene.title} ...", flush=True)
            lines, text = play(scene, home)
            page += lines
            if losses(text):
                printed[scene.title] = losses(text)
        page.append(f"All of it took {(time.monotonic() - began_s) / 60:.0f} minutes.")
    if len(printed) != 3 or len(set(map(tuple, printed.values()))) != 1:
        sys.exit(f"the losses are not the same lines: {printed}")
    out.write_text("\n".join(page) + "\n", "utf-8")
    print(f"the losses were the same each time; wrote {out}")


if __name__ == "__main__":
    main()
