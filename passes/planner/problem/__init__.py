"""What a planner decides about, shared by all of them.

In: a profile, a machine, names that must stay. Out: a Problem.

    problem          Problem: gaps in which a tensor may be evicted, routes to tiers, bytes over time
    solvers          OR-Tools, imported where it is needed; what happens without it
    progress_lines   what a person who waits for a plan reads

Invariant: sizes and times are integers; nothing here chooses.

Log lines: "plans are made without OR-Tools (...)", once.
"""
