"""A lower bound on the time of a step, proved in integers, so that a solver's rounding cannot make it wrong.

In: a problem, a machine, a budget. Out: the bound in nanoseconds, and the ticks at which even the best step
stalls.

    bound             relaxations with more and more check kernels, until the bound is good enough
    relaxation        the linear program, in integers; its rows (rows.py) need no solver
    certificate       a bound from a solver's dual values, proved in integers
    recompute_terms   the unknowns and rows that recomputation adds to the relaxation

Invariant: no plan that plan_check accepts is faster than the bound. A plan that recomputes tensors is
compared with a separate bound, which includes recomputation.
"""
