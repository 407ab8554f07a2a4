"""The problem that all planners share.

In: a profile, a machine, the names of tensors that must be kept resident. Out: a Problem.

    problem          Problem: idle intervals of tensors (gaps), routes to slow tiers, bytes over time
    solvers          OR-Tools, imported at its first use, and the warning if OR-Tools is missing
    progress_lines   progress text for a person who waits for a plan

Invariant: sizes and times are integers. Modules of this package choose no moves.

Log lines: "plans are made without OR-Tools (...)". The line is logged at most one time per process.
"""
