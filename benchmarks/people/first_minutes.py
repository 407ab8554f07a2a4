"""The first minutes of a new user, recorded by running the commands of README.

The script makes a new clone and a new environment. It runs the demo, then a small model, and then the
commands that inspect the run. The output becomes docs/first-minutes.md.

    python benchmarks/people/first_minutes.py [--out docs/first-minutes.md]

The script takes about eight minutes on two cores. It cuts long lines and outputs, and marks the cuts with
"...". It ends with status 1 when a command fails. It also ends with status 1 when the losses of three runs
differ: the run with a budget, the run without a budget, and the replay of the plan.
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
    seen: str  # the conclusion printed below the scene
    files: dict[str, str] = field(default_factory=dict)
    head: int = 40
    tail: int = 0
    in_clone: bool = False


def set_up_commands() -> tuple[str, ...]:
    """Return the two set-up commands of README."""
    block = re.search(r"## Set up.*?```bash\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert block is not None, "README.md has no block of commands under 'Set up'"
    return tuple(block[1].strip().splitlines())


SCENES = (
    Scene(
        "Set up", set_up_commands(), "These are the two commands of README.", head=0, tail=1, in_clone=True
    ),
    Scene(
        "The demo",
        ("python -m teraio demo",),
        "The losses are the same, in a third of the memory.",
        in_clone=True,
    ),
    Scene(
        "Your own model, within 100 MiB",
        ("python mine.py",),
        "One argument of `torch.compile` is new; the loop is unchanged.",
        {"mine.py": MINE},
    ),
    Scene(
        "The same model without teraio",
        ("TERAIO_DISABLE=1 python mine.py",),
        "The losses are the same, to the last digit.",
    ),
    Scene(
        "The report, as text",
        ("teraio report run.timeline.json --profile run.profile.json",),
        "It shows memory over the step, the traffic of every lane, and every wait with its cause.",
        head=36,
        tail=3,
    ),
    Scene(
        "The report, as a page",
        ("teraio report run.timeline.json --profile run.profile.json -o report.html",),
        "The page is one file for a browser; [Reports](reports.md) shows it.",
    ),
    Scene(
        "The machine",
        ("teraio doctor -o here.machine.json",),
        "`teraio doctor` checks which parts of the machine are usable, and how fast they are.",
    ),
    Scene(
        "All planners, on this profile",
        (f"teraio plan {GIVEN} --memory 100MiB --planner all -o run.plan.json",),
        "The two files are enough, without model or training. A planner without a plan gives the reason.",
    ),
    Scene(
        "The waits of a step, and the remedies",
        (f"teraio explain run.plan.json {GIVEN}",),
        "The output names the waits and the busy link, and predicts the effect of more of each resource.",
    ),
    Scene(
        "The plan, kernel by kernel",
        (f"teraio explain run.plan.json {GIVEN} --graph",),
        "Before each kernel stand the transfers that begin, and the waits.",
        head=20,
        tail=6,
    ),
    Scene(
        "The smallest useful memory",
        (f"teraio fit {GIVEN} --within 1.2",),
        "`*` marks the smallest memory whose step takes at most 1.2 times the compute, by simulation.",
    ),
    Scene(
        "The plan, replayed",
        ("python mine.py run.plan.json",),
        "The plan is followed from the second step on, without measuring or planning.",
    ),
    Scene(
        "Will it fit, before anything runs",
        ("python fits.py",),
        "The estimate needs only the model in code. Times are by roofline, bytes are exact.",
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
    """Run the commands of a scene. Return the scene's lines for the page, and the commands' output."""
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
        f"A first session with README alone, on {os.cpu_count()} cores without a GPU.",
        f"`benchmarks/people/first_minutes.py` recorded it on {datetime.date.today()} in a new clone.",
        '"..." marks cut lines and outputs. [Start here](start.md) explains more.',
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
        page.append(f"The whole session took {(time.monotonic() - began_s) / 60:.0f} minutes.")
    if len(printed) != 3 or len(set(map(tuple, printed.values()))) != 1:
        sys.exit(f"the losses differ: {printed}")
    out.write_text("\n".join(page) + "\n", "utf-8")
    print(f"the losses are equal in all runs; wrote {out}")


if __name__ == "__main__":
    main()
