"""Benchmark of a report's page in a real browser, without any training.

    python benchmarks/people/report_page.py [--page report.html] [--modules node_modules]
                                            [--pictures docs/pictures]

Without `--page` the script makes a page with more than 10,000 kernels. It shows the synthetic profile of a
well-known model with nine micro-batches, a greedy plan, and the predicted step. The "measured" step is the
predicted step with randomly disturbed times.

The script needs `chromium` (apt-get install chromium), node, and playwright-core. axe-core is optional and
looks for accessibility violations (npm install playwright-core axe-core). Without playwright-core, the script
only takes a picture of the light theme, by `chromium --headless --screenshot`. It then reports only the time
for this picture. The script prints one JSON object.
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

from teraio.formats.machine import Machine
from teraio.formats.timeline import Span, Timeline
from teraio.passes.planner import planners
from teraio.passes.planner.simulate import simulate
from teraio.passes.synth.profiles import ProfileRequest, synth
from teraio.report import content, html_page

HERE = Path(__file__).resolve().parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def disturbed(line: Timeline, seed: int = 0) -> Timeline:
    """Return the timeline with disturbed times. Each kernel takes 0.9 to 1.2 times as long, and shifts all
    later times.
    """
    random = Random(seed)
    shifts: list[tuple[int, int]] = []  # (end of a kernel, shift of all later times)
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
    """Write a page of more than 10,000 kernels. Return its counts and the time that it took."""
    profile = synth("llama-3.1-8b", ProfileRequest(batch=2, micro_batches=9))
    machine = Machine.read(HERE.parents[1] / "profiles/machines/h100-4ssd.machine.json")
    plan = planners.plan(profile, machine, 40 * 2**30, planner="greedy", fingerprint="")
    predicted = simulate.simulate(plan, profile, machine)
    sources = content.Sources(
        disturbed(predicted), "made-up.timeline.json", profile, plan, machine, predicted
    )
    began = time.perf_counter()
    text = html_page.report_as_html(content.assemble_content(sources))
    took = time.perf_counter() - began
    path.write_text(text)
    return {"kernels": len(profile.kernels), "tensors": len(profile.tensors), "made_s": round(took, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--page", type=Path, help="an existing page instead of the generated one")
    parser.add_argument(
        "--modules", type=Path, default=Path("node_modules"), help="folder of playwright-core"
    )
    parser.add_argument("--pictures", type=Path, help="folder for pictures in light and dark")
    args = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"no browser: none of {', '.join(BROWSERS)} is on PATH", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        page = args.page.resolve() if args.page else Path(folder) / "report.html"
        result: dict[str, Any] = {} if args.page else made(page)
        result["page_bytes"] = page.stat().st_size
        pictures = str(args.pictures.resolve()) if args.pictures else ""
        if shutil.which("node") and (args.modules / "playwright-core").is_dir():
            modules = str(args.modules.resolve())
            command = ["node", str(HERE / "report_page.mjs"), str(page), browser, modules, pictures]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode:
                print(ran.stderr, file=sys.stderr)
                return 1
            result |= json.loads(ran.stdout)
        else:
            target = Path(pictures or folder) / "report-light.png"
            began = time.perf_counter()
            command = [browser, "--headless", "--no-sandbox", f"--screenshot={target}"]
            subprocess.run(
                [*command, "--window-size=1280,860", page.as_uri()], check=True, capture_output=True
            )
            result["browser_start_to_picture_s"] = round(time.perf_counter() - began, 2)
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
