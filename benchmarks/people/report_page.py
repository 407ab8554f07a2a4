"""How a report's page does in a real browser: one of 10,000 kernels, or one that is there.

    python benchmarks/people/report_page.py [--page report.html] [--modules node_modules] [--pictures
    docs/pictures]

Without --page it makes one: the profile of a well-known model with nine micro-batches, a greedy plan, its
predicted step, and the same step with times that were disturbed at random, as the measured one. Nothing of
that is a measurement; what is measured is the page.

It needs `chromium` (apt-get install chromium), node, and playwright-core; axe-core looks for violations if it
is there, too (npm install playwright-core axe-core). Without playwright-core it takes the picture in light
only, with `chromium --headless --screenshot`, and tells how long all of that took. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from teraio.cli.report import content, html_page
from teraio.formats.machine import Machine
from teraio.formats.timeline import Span, Timeline
from teraio.passes.planner import planners
from teraio.passes.planner.simulate import simulate
from teraio.passes.synth.profiles import ProfileRequest, synth

HERE = Path(__file__).resolve().parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def disturbed(line: Timeline, seed: int = 0) -> Timeline:
    """As if it had been measured: each kernel takes 0.9 to 1.2 times as long, what follows is later."""
    random = Random(seed)
    shifts: list[tuple[int, int]] = []  # where a kernel ended, and how much later it does now
    late = 0
    for span in line.spans:
        if span.track == "compute":
            late += round((span.end_ns - span.start_ns) * random.uniform(-0.1, 0.2))
            shifts.append((span.end_ns, late))

    def moved() -> Iterator[Span]:
        at, shift = 0, 0
        for span in sorted(line.spans, key=lambda each: each.start_ns):
            while at < len(shifts) and shifts[at][0] <= span.start_ns:
                shift = shifts[at][1]
                at += 1
            longer = shifts[at][1] - shift if span.track == "compute" and at < len(shifts) else 0
            yield replace(
                span, start_ns=max(0, span.start_ns + shift), end_ns=max(0, span.end_ns + shift + longer)
            )

    spans = tuple(span for span in moved() if span.start_ns <= span.end_ns)
    stretch = (line.step_ns + late) / line.step_ns
    counters = tuple(replace(c, at_ns=round(c.at_ns * stretch)) for c in line.counters)
    return replace(line, kind="measured", spans=spans, counters=counters, step_ns=line.step_ns + late)


def made(path: Path) -> dict[str, Any]:
    """A page of more than 10,000 kernels."""
    profile = synth("llama-3.1-8b", ProfileRequest(batch=2, micro_batches=9))
    machine = Machine.read(HERE.parents[1] / "profiles/machines/h100-4ssd.machine.json")
    plan = planners.plan(profile, machine, 40 * 2**30, planner="greedy", fingerprint="")
    said = simulate.simulate(plan, profile, machine)
    sources = content.Sources(disturbed(said), "made-up.timeline.json", profile, plan, machine, said)
    began = time.perf_counter()
    text = html_page.report_as_html(content.assemble_content(sources))
    took = time.perf_counter() - began
    path.write_text(text)
    return {"kernels": len(profile.kernels), "tensors": len(profile.tensors), "made_s": round(took, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--page", type=Path, help="a page that is there, instead of the large one")
    parser.add_argument("--modules", type=Path, default=Path("node_modules"), help="where playwright-core is")
    parser.add_argument("--pictures", type=Path, help="folder for pictures in light and dark")
    args = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"no browser: none of {', '.join(BROWSERS)} is on PATH", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        page = args.page.resolve() if args.page else Path(folder) / "report.html"
        told: dict[str, Any] = {} if args.page else made(page)
        told["page_bytes"] = page.stat().st_size
        pictures = str(args.pictures.resolve()) if args.pictures else ""
        if shutil.which("node") and (args.modules / "playwright-core").is_dir():
            modules = str(args.modules.resolve())
            command = ["node", str(HERE / "report_page.mjs"), str(page), browser, modules, pictures]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode:
                print(ran.stderr, file=sys.stderr)
                return 1
            told |= json.loads(ran.stdout)
        else:
            target = Path(pictures or folder) / "report-light.png"
            began = time.perf_counter()
            command = [browser, "--headless", "--no-sandbox", f"--screenshot={target}"]
            subprocess.run(
                [*command, "--window-size=1280,860", page.as_uri()], check=True, capture_output=True
            )
            told["browser_start_to_picture_s"] = round(time.perf_counter() - began, 2)
    print(json.dumps(told, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
