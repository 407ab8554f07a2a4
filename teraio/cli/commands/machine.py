"""`teraio machine`: lists the machine descriptions that come with teraio."""

from __future__ import annotations

import argparse
import json

from teraio.formats import shipped_files
from teraio.formats.machine import Machine
from teraio.text_table import table_for_stdout
from teraio.units import fmt_bytes, fmt_rate

WHOLE = """\
A machine file describes the tiers of a machine with their capacities, and its links with their rates.
`--machine` takes such a file, or the name of a machine that comes with teraio."""

WHOLE_EPILOG = """\
examples:
  teraio machine list
  teraio plan llama-3.1-8b --machine rtx4090-1ssd --memory 22GiB"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = WHOLE, WHOLE_EPILOG
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    command = commands.add_parser(
        "list",
        help="list the machines that come with teraio",
        description="Lists the machines that come with teraio. Their figures are from data sheets.",
        epilog="example:\n  teraio machine list",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=list_machines)


def list_machines(args: argparse.Namespace) -> int:
    """Print a row for each machine that comes with teraio."""
    names = shipped_files.MACHINES.names()
    machines = {
        name: shipped_files.read_named_machine(str(shipped_files.MACHINES.path_of(name))) for name in names
    }
    if args.json:
        found = [
            {
                "name": name,
                "what": shipped_files.ABOUT_MACHINES[name],
                "path": str(shipped_files.MACHINES.path_of(name)),
                "bytes": {tier.name: tier.capacity_bytes for tier in machine.tiers},
                "bytes_per_s": {
                    f"{link.source} to {link.target}": link.bandwidth_bytes_per_s for link in machine.links
                },
            }
            for name, machine in machines.items()
        ]
        print(json.dumps({"machines": found}))
        return 0
    head = ("machine", "what it is", "device", "host", "drives", "they read", "they write", "to the host")
    rows = [_machine_as_table_row(name, machine) for name, machine in machines.items()]
    print(table_for_stdout([head, *rows], left=2))
    print("  figures from data sheets; `teraio doctor -o here.machine.json` measures this machine")
    return 0


def _machine_as_table_row(name: str, machine: Machine) -> tuple[str, ...]:
    sizes = {tier.name: fmt_bytes(tier.capacity_bytes) for tier in machine.tiers}
    rates = {(x.source, x.target): fmt_rate(x.bandwidth_bytes_per_s) for x in machine.links}
    return (
        name,
        shipped_files.ABOUT_MACHINES[name],
        *(sizes.get(tier, "-") for tier in ("device", "host", "ssd")),
        *(rates.get(way, "-") for way in (("ssd", "device"), ("device", "ssd"), ("device", "host"))),
    )
