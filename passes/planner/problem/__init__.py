"""The problem that all planners share.

In: a profile, a machine, the names of tensors that must be kept resident. Out: a Problem.

    problem          Problem: gaps in which a tensor may be evicted, routes to tiers, bytes over time
    solvers          OR-Tools, imported at its first use, and the warning if OR-Tools is missing
    progress_lines   progress text for a person who waits for a plan

Invariant: sizes and times are integers. Modules of this package make no choices about moves.

Log lines: "plans are made without OR-Tools (...)". The line is logged at most one time per process.
"""
