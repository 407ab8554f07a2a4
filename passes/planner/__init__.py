"""Planners. They choose the ticks of each tensor's moves, and prove how far a plan can be from the best plan.

In: a profile, a machine, a budget. Out: a Plan with its predicted step, or a PlanError with the proof that no
plan exists.

    planners          the entry points: plan, bound_ns, tensors_to_recompute
    auto              the default: greedy, search and the integer program in turn, until the bound is near
    problem           the problem that every planner solves: gaps, routes, ledgers
    simulate          the step time of a plan by the native recurrence, and its timeline by simulation
    bound             the shortest step that any plan can reach, proved in integers
    greedy, search, exact      three planners, from fast to thorough
    published         planners of published systems, for comparison
    joint_recompute   tensors to recompute, chosen together with the moves
    endurance         plans that keep to a daily limit for bytes written to SSDs

Invariant: `plan` returns a plan with moves only after formats.plan_check has accepted it. The package uses no
torch and no device.
"""
