"""Planners. They choose when each tensor is evicted and fetched, and prove how far a plan can be from the
best plan.

In: a profile, a machine, a budget. Out: a Plan with its predicted step time, or a PlanError with the proof
that no plan exists.

    planners          the entry points: plan, bound_ns, tensors_to_recompute
    planner_process   a process of its own for a call of the planners, while the caller goes on
    auto              the default: greedy, search and exact in turn, until a plan is near the bound
    problem           the problem that every planner solves: idle intervals of tensors, tiers, bytes over time
    simulate          the step time of a plan by a recurrence in C++, and its timeline by simulation
    bound             a lower bound on the step time of every plan, proved in integers
    greedy, search, exact      three planners, from fast to thorough
    published         planners of published systems, for comparison
    joint_recompute   tensors to recompute, chosen together with the moves
    update_choice     updates that run in the next forward or in the backward
    endurance         plans that keep to a daily limit for bytes written to SSDs

Invariant: `plan` returns a plan with moves only after `teraio.formats.plan_check` has accepted the plan. The
package uses neither torch nor a device.

Log lines: "the planner's process is stopped before it has made a plan". The training process logs the lines
of a planner's process when the plan is ready.
"""
