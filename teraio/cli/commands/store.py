"""`teraio store`: what dead processes left in a store."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from teraio.units import fmt_bytes

DESCRIPTION = """\
A store is a file without a name, so that its bytes are gone with its process, `kill -9` included. What a
process leaves when it is killed in the very moment of making one is listed and cleared here; each new store
in the same directory clears it, too. What a live process holds is never touched."""

EPILOG = """\
examples:
  teraio store list
  teraio store clear /mnt/nvme/teraio"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("action", choices=("list", "clear"))
    parser.add_argument("directory", nargs="*", help="default: where stores are made by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    from teraio.runtime.store import directories, stale_directories

    told = {}
    for directory in (
        map(Path, args.directory) if args.directory else directories.choose_default_directories()
    ):
        found = (
            stale_directories.remove_dead_directories(directory)
            if args.action == "clear"
            else stale_directories.list_store_directories(directory)
        )
        told[str(directory)] = [
            {"state": each.state, "process": each.pid, "bytes": each.size_bytes, "path": str(each.path)}
            for each in found
        ]
        if args.json:
            continue
        absent = ", there is no such directory" if stale_directories.is_missing(directory) else ""
        print(f"{directory}: {len(found)} {'cleared' if args.action == 'clear' else 'found'}{absent}")
        for each in found:
            print(f"  {each.state:<8} process {each.pid:<8} {fmt_bytes(each.size_bytes):>10}  {each.path}")
    if args.json:
        print(json.dumps({"action": args.action, "directories": told}))
    return 0
