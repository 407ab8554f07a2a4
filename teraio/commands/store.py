"""`teraio store`: what dead processes left in a store."""

from __future__ import annotations

import argparse
from pathlib import Path

from teraio.units import fmt_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "clear"))
    parser.add_argument("directory", nargs="*", help="default: where stores are made by default")


def main(args: argparse.Namespace) -> int:
    from teraio.runtime import leftovers, store_places

    for directory in map(Path, args.directory) if args.directory else store_places.default_directories():
        found = leftovers.clear(directory) if args.action == "clear" else leftovers.leftovers(directory)
        print(f"{directory}: {len(found)} {'cleared' if args.action == 'clear' else 'found'}")
        for each in found:
            print(f"  {each.state:<8} process {each.pid:<8} {fmt_bytes(each.size_bytes):>10}  {each.path}")
    return 0
