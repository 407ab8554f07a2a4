"""The search planner: improves greedy plans by small changes, natively.

In: a problem, greedy's portfolio, a time limit. Out: the best plan met.

    search        rounds of the native search, until time is up or the bound is near
    plan_index    a plan as arrays of integers, and back

Invariant: never worse than where it started; the same seed and the same rounds give the same plan.
"""
