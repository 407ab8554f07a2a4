"""The greedy planner: which gaps are spent evicted, and when each move begins.

In: a problem and a budget. Out: the best plan of a small portfolio, by simulation.

    greedy     greedy, greedy_plans_with_periods: several targets and orders, the best of their plans
    choose     which gaps, to which tier
    timing     when bytes leave and return: an Absence per gap
    packing    what goes where when slow tiers are nearly full

Invariant: where a plan exists, greedy finds one.
"""
