"""The search planner. Native code improves plans of the greedy planner by small changes.

In: a problem, the plans of the greedy planner, a time limit. Out: the fastest plan found.

    search        the native search, until the time is up, or until no plan can be faster
    plan_index    the conversion of a plan to arrays of integers and back

Invariant: the result is at least as fast as each plan from which the search starts. The result depends only
on the start plans, the seed and the number of rounds.
"""
