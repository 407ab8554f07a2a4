"""Two simulators of a step with a plan, a native one and an event simulation. Their results agree.

In: a plan, a profile, a machine. Out: times, a timeline, the memory peak.

    simulate           the timeline, from the event simulation, and the step time, from the native simulator
                       (csrc/planner/recurrence.cpp)
    event_simulation   the event simulation, with links that share bandwidth, and with random changes of times

Invariant: if plan_check accepts a plan, the plan's predicted step is at least as long as the certified bound.
"""
