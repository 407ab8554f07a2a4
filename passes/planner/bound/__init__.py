"""How fast a step can be at best: a lower bound that no rounding breaks.

In: a problem, a machine, a budget. Out: nanoseconds, and the kernels at which the step must wait.

    bound             lower_bound: relaxations of growing size until the bound is good enough
    relaxation        the linear program, in integers; rows holds it without a solver
    certificate       a bound from a solver's dual values, proved in integers
    recompute_terms   what computing tensors again adds to the relaxation

Invariant: no plan that plan_check accepts is faster than the bound. A plan that computes tensors again is
compared with the bound that allows it.
"""
