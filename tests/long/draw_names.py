"""A random draw of function names. A reader who has not seen the tree guesses from each name the purpose of
the function.

    python tests/long/draw_names.py [--count 30] [--seed HASH] [--answers]

By default, the seed is the hash of the checked-out commit, so that nobody chooses the draw. With `--answers`,
the script prints the first line of each docstring beside the name, so that the reader can check the guess.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import tree


def functions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (qualified name, first line of the docstring) of each function and method. Special methods are
    left out.
    """
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
    seed = args.seed or tree.commit_hash()
    found = [(path, *about) for path in sorted(tree.package().values()) for about in functions(path)]
    for path, name, about in random.Random(seed).sample(found, args.count):
        print(f"{path}  {name}{f'    {about}' * args.answers}")
    print(f"{args.count} of {len(found)} functions, drawn with {seed}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
