"""`teraio doctor` on a machine with a GPU."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import standin  # noqa: F401

from teraio.cli import main


def check_links_of_the_gpu_are_told() -> dict[str, Any]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main.main(["doctor", "--json", "--seconds", "0.3"])
    report = json.loads(said.getvalue())
    assert code in (0, 1), report
    verdicts = {finding["name"]: finding["verdict"] for finding in report["findings"]}
    assert verdicts["GPU"] == "PASS", report["findings"]
    assert len(report["links"]) == 2, report["links"]
    assert all(link["evict_bytes_per_s"] > 0 < link["fetch_bytes_per_s"] for link in report["links"])
    return {"links": report["links"]}
