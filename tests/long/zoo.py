"""A run of forty model classes of Hugging Face and a few others. Each class trains under three budgets, and
the script compares the numbers with a training without teraio.

    python tests/long/zoo.py [names] [--steps 4] [--inner eager] [--json results.json]

The script prints a row when a class ends, then the faults. It exits with 1 if there is a fault. A class takes
some 15 s.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import zoo_models
from says import exactly
from zoo_verdict import HEAD, faults, line, results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = [row.name for row in zoo_models.ROWS]
    parser.add_argument("rows", nargs="*", metavar="name", help=", ".join(known))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--inner", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    done, wrong = [], 0
    print(HEAD)
    for name in args.rows or known:
        for result in results([name], args.steps, args.inner):
            found = faults(result)
            print(line(result), "FAIL" if found else "ok", flush=True)
            for fault in found:
                print("    ", fault, flush=True)
            done.append({**result, "faults": found})
            wrong += bool(found)
        if args.json:
            args.json.write_text(json.dumps(done, indent=1))
    return 0 if exactly("zoo-classes-as-asked-for", len(done) - wrong, len(done)) else 1


if __name__ == "__main__":
    sys.exit(main())
