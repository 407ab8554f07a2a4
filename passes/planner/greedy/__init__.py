"""The greedy planner. It first chooses the gaps in which tensors are evicted, then the ticks of their moves.

In: a problem and a budget. Out: of a small portfolio of plans, the plan with the shortest simulated step.

    greedy     the portfolio: plans for several targets and orders, of which the best is returned
    choose     the gaps in which tensors are evicted, and their tiers
    timing     the ticks of each eviction and fetch: an Absence per gap
    packing    the choice of tiers by a solver, for slow tiers that are nearly full

Invariant: if a plan exists, greedy finds one.
"""
