"""The commands of `teraio` that plan offline, one file each. `add_arguments(parser)` names what runs them.

In: parsed arguments. Out: text for people, or one JSON object with --json; files of plans and timelines.

    profile, machine          what a profile holds; profiles and machines that come with teraio
    plan, simulate, fit       a plan; its predicted step; how little memory a step needs
    explain, report           why a step takes as long as it does; pages, lines and traces
    cache, store              plans kept from earlier runs; what dead processes left in a store
    options, completion       what a run can be told; scripts for shells
    plan_request, plan_figures, step_listing, parser      what several of them share

Invariant: a command only raises; main.py turns that into one line. No command opens a device.
"""
