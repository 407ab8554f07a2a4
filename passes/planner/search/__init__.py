"""The search planner. Native code improves greedy's plans by small changes.

In: a problem, greedy's portfolio, a time limit. Out: the fastest plan found.

    search        the rounds of the native search, until the time is up or a plan meets the bound
    plan_index    the conversion of a plan to arrays of integers and back

Invariant: the result is at least as fast as each plan that the search starts from. The same seed and the same
rounds give the same plan.
"""
