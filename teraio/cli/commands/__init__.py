"""The commands of `teraio` that plan offline, one file each.

Each module has `add_arguments(parser)`, and `main(args)` or subcommands.

In: parsed arguments. Out: text for people, or one JSON object with --json; files of plans and timelines.

    profile, machine          (1) profiles, (2) machines that come with teraio
    plan, simulate, fit       (1) a plan, (2) the predicted step of a plan, (3) the smallest budget for a step
    explain, report           (1) causes of the waits in a step, (2) a step as a page, text or trace
    cache, store              (1) plans of earlier runs, (2) store directories that dead processes left
    options, completion       (1) options of a run, (2) completion scripts for shells
    plan_request, plan_figures, step_listing, parser      code that several commands share

Invariant: a command raises an exception on bad input, and main.py prints the exception as one line. No
command opens a device.
"""
