"""Two simulators of a step with a plan, the native recurrence and the event simulation. Their results agree.

In: a plan, a profile, a machine. Out: times, a timeline, the memory peak.

    simulate           the predictions: a timeline by event simulation, the step time by the native recurrence
                       (csrc/planner/recurrence.cpp)
    event_simulation   the event simulation, with links that share bandwidth, and with jitter

Invariant: the predicted step of a plan that plan_check accepts is never shorter than the certified bound.
"""
