"""What AOTAutograd hands over, before an inner program is chosen.

In: joint graphs and the graphs that they are cut into. Out: which outputs reach the user, what is saved and
what is computed again.

    aot                which outputs are results, which arguments come back as views
    recompute_cut      where the joint graph is cut, with some saved tensors computed again
    foreign_backends   whether another backend compiled something, whose kernels take addresses of weights

Invariant: a cut changes which tensors are saved and no number. No slot is laid here.

Log lines: "... activations are saved: made again they do not fit", "pass recompute_cut: ..." (debug).
"""
