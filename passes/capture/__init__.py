"""Graphs and metadata from AOTAutograd, before an inner program is chosen.

In: joint graphs, and the forward and backward graphs cut from them. Out: the outputs that reach the user, the
saved tensors, and the recomputed tensors.

    aot                outputs that reach the caller, and arguments used after the program has returned
    gathered_weights   gathers of sharded weights, which the backward repeats
    recompute_cut      the cut of the joint graph, with some saved tensors recomputed
    foreign_backends   reports of compiles by other backends, because their kernels take addresses of weights

Invariant: a cut changes only which tensors the forward saves, and no computed number.

Log lines: "... activations are saved: ...", "pass recompute_cut: ..." (debug).
"""
