"""Planners: which tensor moves when, and how far such a plan is at most from the best one.

In: a profile, a machine, a budget. Out: a Plan with its predicted step, or a PlanError that proves why not.

    planners          plan, predicted_step_ns, bound_ns: what others call
    auto              the default: greedy, search and the integer program in turn, until the bound is near
    problem           what is decided about: gaps, routes, ledgers
    simulate          how long a step takes with a plan: a fast recurrence, and a simulation of events
    bound             how fast a step can be at best, certified in integers
    greedy, search, exact      three planners, from fast to thorough
    published         planners of published systems, for comparison
    joint_recompute   what to compute again, decided together with what moves
    endurance         plans that keep to a cap on bytes written per day

Invariant: formats.plan_check has accepted every plan with moves that `plan` returns. No torch, no device.
"""
