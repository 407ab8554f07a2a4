"""The greedy planner. It first chooses the gaps (idle intervals of tensors) in which tensors are evicted. It
then chooses the ticks of the evictions and fetches.

In: a problem and a budget. Out: the fastest of several plans, by their simulated steps.

    greedy     several plans, for several targets of memory, and the choice of the fastest plan
    choose     the gaps in which tensors are evicted, and the tiers of these tensors
    timing     the ticks of each eviction and fetch: an Absence for each gap
    packing    the choice of tiers by a solver, for slow tiers that are nearly full

Invariant: if a plan exists, greedy finds one. If slow tiers are nearly full, it needs OR-Tools, whose solver
has a time limit.
"""
