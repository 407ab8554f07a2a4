"""Planners of published systems, by their rules, for comparison and for `auto`'s portfolio.

In: a problem, a machine, a budget. Out: the plan that the published rules make, or a PlanError.

    common          absences in, a plan out; links as bins of bytes
    zero_infinity   layer by layer, as ZeRO-Infinity streams
    g10             every transfer hidden behind kernels, or a refusal
    tencache        a sliding window over size classes
    teraio_paper    the greedy of the TERAIO paper

Invariant: their plans pass plan_check like all others.
"""
