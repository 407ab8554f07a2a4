"""Execution of a notebook in Jupyter, and pictures of its outputs in a real browser.

    python benchmarks/people/notebook.py [--notebook examples/notebook.ipynb] [--pictures FOLDER]

The script executes the notebook in a temporary folder, checks its outputs, and converts it to a page in
Jupyter's light and dark theme. With `--pictures` it also takes pictures of both pages, narrow and wide.

It needs nbclient, nbconvert and ipykernel (pip install nbclient nbconvert ipykernel), and `chromium` for
pictures (apt-get install chromium). It prints one JSON object: the seconds of the run, and for each output
the bytes of its HTML and of its text. It exits with 1 if an output is missing, too large, or loads anything.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE_MAX = 200 * 2**10
VIEWS = 4  # the estimate, the plan, the figures of the run and the timeline
WIDTHS = {"wide": 1180, "narrow": 520}
LOADS = re.compile(
    r"<(script|img|link|iframe|object|embed)\b|\bsrc=|\bhref=|url\(|@import| on[a-z]+=", re.IGNORECASE
)


def executed(notebook: Path, folder: str) -> Any:
    """Execute a notebook in a folder, and return it with its outputs."""
    import nbclient
    import nbformat

    content = nbformat.read(notebook, as_version=4)
    nbclient.NotebookClient(content, timeout=600, resources={"metadata": {"path": folder}}).execute()
    return content


def html_outputs(content: Any) -> list[dict[str, str]]:
    """Return the outputs that have HTML, by MIME type."""
    outputs = [output for cell in content.cells for output in cell.get("outputs", ())]
    return [dict(output.data) for output in outputs if "text/html" in output.get("data", {})]


def write_pictures(content: Any, folder: Path, browser: str) -> None:
    """Write a picture of the page for each theme of Jupyter and each width."""
    from nbconvert import HTMLExporter

    folder.mkdir(parents=True, exist_ok=True)
    for theme in ("light", "dark"):
        html, _ = HTMLExporter(theme=theme, embed_images=True).from_notebook_node(content)
        with tempfile.TemporaryDirectory() as pages:
            page = Path(pages) / f"{theme}.html"
            page.write_text(html, encoding="utf-8")
            for name, width in WIDTHS.items():
                target = folder / f"notebook-{theme}-{name}.png"
                command = [
                    browser,
                    "--headless",
                    "--no-sandbox",
                    "--hide-scrollbars",
                    f"--screenshot={target}",
                ]
                command += ["--virtual-time-budget=4000", f"--window-size={width},3400", page.as_uri()]
                subprocess.run(command, check=True, capture_output=True)


def faults_of(outputs: list[dict[str, str]]) -> list[str]:
    faults = [] if len(outputs) == VIEWS else [f"{len(outputs)} outputs have HTML; expected {VIEWS}"]
    for number, output in enumerate(outputs, start=1):
        html = output["text/html"]
        if len(html) > SIZE_MAX:
            faults.append(f"output {number} has {len(html)} bytes of HTML; at most {SIZE_MAX} are allowed")
        if found := LOADS.search(html):
            faults.append(f"output {number} loads a file or runs code: {found[0]}")
        if "teraio-view" not in html:
            faults.append(f"output {number} is no view of teraio")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--notebook", type=Path, default=ROOT / "examples" / "notebook.ipynb")
    parser.add_argument("--pictures", type=Path, help="folder for pictures")
    args = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if args.pictures and browser is None:
        print(f"no browser: none of {', '.join(BROWSERS)} is on PATH", file=sys.stderr)
        return 1
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        content = executed(args.notebook, folder)
    took_s = round(time.perf_counter() - began, 1)
    outputs = html_outputs(content)
    if args.pictures and browser:
        write_pictures(content, args.pictures, browser)
    sizes = [{kind: len(text.encode()) for kind, text in output.items()} for output in outputs]
    faults = faults_of(outputs)
    print(json.dumps({"run_s": took_s, "outputs": sizes, "faults": faults}, indent=1))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
