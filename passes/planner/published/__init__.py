"""Planners of published systems, made by their published rules, for comparison and for `auto`'s portfolio.

In: a problem, a machine, a budget. Out: the plan that the published rules make, or a PlanError.

    common          the plan from absences, and the bytes that each link can still carry
    zero_infinity   the layer-wise streaming of ZeRO-Infinity
    g10             G10, whose plan hides every transfer behind kernels, or is refused
    tencache        the sliding window of 10Cache over size classes
    teraio_paper    the greedy algorithm of the TERAIO paper

Invariant: plan_check accepts every plan of these planners.
"""
