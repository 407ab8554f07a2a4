"""Planners of published systems, which follow the systems' published rules. They are for comparison, and
`auto` uses their plans too.

In: a problem, a machine, a budget. Out: the plan that the published rules make, or a PlanError.

    common          the plan from evicted intervals, and the bytes that each link can still carry
    zero_infinity   the layer-wise streaming of ZeRO-Infinity
    g10             G10, whose transfers all run while kernels run. Otherwise it has no plan
    tencache        10Cache, which moves a sliding window over tensors in size classes
    teraio_paper    the greedy algorithm of the TERAIO paper

Invariant: plan_check accepts every plan of these planners.
"""
