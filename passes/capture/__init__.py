"""Graphs and metadata from AOTAutograd, before an inner program is chosen.

In: joint graphs, and the forward and backward graphs cut from them. Out: the outputs that reach the user, the
saved tensors, and the recomputed tensors.

    aot                outputs that reach the caller, and arguments used after the return
    recompute_cut      the cut of the joint graph, with some saved tensors recomputed
    foreign_backends   a watch on compiles by other backends, because their kernels take addresses of weights

Invariant: a cut changes which tensors are saved, and changes no computed number. This package lays no slots.

Log lines: "... activations are saved: ...", "pass recompute_cut: ..." (debug).
"""
