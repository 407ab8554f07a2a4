"""`teraio store`: lists or removes directories of processes that died while they made a store."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from teraio.units import fmt_bytes

DESCRIPTION = """\
A store is a file without a name, so the kernel frees its bytes when the process ends, also after `kill -9`.
A process that is killed while it makes a store leaves a directory. These commands list and clear such
directories, and each new store in the same place clears them, too. Stores of live processes are never
touched."""

EPILOG = """\
examples:
  teraio store list
  teraio store clear /mnt/nvme/teraio"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("action", choices=("list", "clear"))
    parser.add_argument("directory", nargs="*", help="default: the directories in which teraio makes stores")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    from teraio.runtime.store import directories, stale_directories

    listing = {}
    for directory in (
        map(Path, args.directory) if args.directory else directories.choose_default_directories()
    ):
        found = (
            stale_directories.remove_dead_directories(directory)
            if args.action == "clear"
            else stale_directories.list_store_directories(directory)
        )
        listing[str(directory)] = [
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
        print(json.dumps({"action": args.action, "directories": listing}))
    return 0
