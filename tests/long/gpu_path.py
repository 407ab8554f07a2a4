"""A run of the GPU path on the CUDA build of torch, without a GPU. The stand-in of tests/cuda_without_gpu
replaces the driver.

    python tests/long/gpu_path.py [--all] [options of prove.py]

The script prints lines `name value target PASS|FAIL`, and exits with 1 if a line says FAIL. When a check
ends, its result is printed on stderr. The first run installs torch, which takes 5 GB and some minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from says import as_it_is, at_least, exactly

PROVE = Path(__file__).resolve().parents[1] / "cuda_without_gpu" / "prove.py"


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--out", type=Path)
    request, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        out = request.out or Path(folder) / "rows.json"
        out.unlink(missing_ok=True)
        command = [sys.executable, str(PROVE), "--out", str(out), *rest]
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        rows = json.loads(out.read_text())["rows"] if out.exists() else []
    waits = [row["found"] for row in rows if row["held"] and "wrong_without" in row["found"]]
    good = at_least("gpu-path-checks-held", sum(row["held"] for row in rows), 1)
    good &= exactly("gpu-path-checks-failed", sum(not row["held"] for row in rows))
    as_it_is("gpu-path-waits-left-out-and-found", sum(found["wrong_without"] > 0 for found in waits))
    as_it_is("gpu-path-seconds", round(sum(row["seconds"] for row in rows)))
    return 0 if good and not done.returncode else 1


if __name__ == "__main__":
    sys.exit(main())
