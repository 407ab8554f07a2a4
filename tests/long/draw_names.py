"""Functions drawn at random, for someone who has not seen the tree: by path and name, what does each do?

    python tests/long/draw_names.py [--count 30] [--seed HASH] [--answers]

The seed is the hash of the commit that is checked out, so nobody chooses what is drawn. With `--answers` each
comes with the first line of its docstring, to judge by.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import tree


def functions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (qualified name, first line of the docstring) of each function and method, but `__those__`."""
    classes = (node for node in ast.walk(tree.tree(path)) if isinstance(node, ast.ClassDef))
    owners: list[ast.Module | ast.ClassDef] = [tree.tree(path), *classes]
    for owner in owners:
        for node in owner.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__"):
                name = f"{owner.name}.{node.name}" if isinstance(owner, ast.ClassDef) else node.name
                yield name, (ast.get_docstring(node) or "").split("\n", maxsplit=1)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", help="default: the hash of HEAD")
    parser.add_argument("--answers", action="store_true")
    args = parser.parse_args()
    head = ["git", "rev-parse", "HEAD"]
    seed = (
        args.seed
        or subprocess.run(head, cwd=tree.ROOT, capture_output=True, text=True, check=True).stdout.strip()
    )
    found = [(path, *about) for path in sorted(tree.package().values()) for about in functions(path)]
    for path, name, about in random.Random(seed).sample(found, args.count):
        print(f"{path}  {name}{f'    {about}' * args.answers}")
    print(f"{args.count} of {len(found)} functions, drawn with {seed}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
