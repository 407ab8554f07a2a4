"""A check of `teraio doctor` on a machine with a GPU."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import standin  # noqa: F401

from teraio.cli import main


def check_the_doctor_reports_links_of_the_gpu() -> dict[str, Any]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = main.main(["doctor", "--json", "--seconds", "0.3"])
    report = json.loads(output.getvalue())
    assert code in (0, 1), report
    verdicts = {finding["name"]: finding["verdict"] for finding in report["findings"]}
    assert verdicts["GPU"] == "PASS", report["findings"]
    assert len(report["links"]) == 2, report["links"]
    assert all(link["evict_bytes_per_s"] > 0 < link["fetch_bytes_per_s"] for link in report["links"])
    return {"links": report["links"]}
