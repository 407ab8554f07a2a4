"""The commands of `teraio` that plan offline, one file each: `add_arguments(parser)` and `main(arguments)`.

    profile, machine          what a profile holds; profiles and machines that come with teraio
    plan, simulate, fit       a plan; its predicted step; how little memory a step needs
    explain, report           why a step takes as long as it does; pages, lines and traces
    cache, store              plans kept from earlier runs; what dead processes left in a store
    options, completion       what a run can be told; scripts for shells
    plan_request, plan_figures, step_listing, parser      what several of them share

They print for people, or one JSON object with --json. They raise what main.py turns into one line.
"""
