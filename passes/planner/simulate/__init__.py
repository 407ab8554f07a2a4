"""How long a step takes with a plan. Two simulators, which agree to the nanosecond where links share nothing.

In: a plan, a profile, a machine. Out: times, a timeline, the peak of memory.

    simulate           a recurrence over kernels and links, in Python and natively: fast
    event_simulation   moment by moment, with links that share bandwidth, and jitter

Invariant: the predicted step of a plan that plan_check accepts is never shorter than the certified bound.
"""
