"""A lower bound on the time of a step. The proof is in integers, so that a solver's rounding cannot make the
bound wrong.

In: a problem, a machine, a budget. Out: the bound in nanoseconds, and the kernels before which even the best
step waits.

    bound             the search for the bound: relaxations with more and more check kernels
    relaxation        a linear program that no plan can beat; it limits memory and time only at check kernels
    rows              a linear program in integers
    certificate       a bound from a solver's dual values, proved in integers
    placements        a bound for all placements of the optimizer's updates
    recompute_terms   the unknowns and rows that recomputation adds to the relaxation

Invariant: no plan that `plan_check` accepts is faster than the bound. Plans that recompute tensors have a
separate bound, which includes recomputation.
"""
