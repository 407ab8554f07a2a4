"""Slots in an AOTAutograd FX graph that is executed node by node: the inner program `eager`.

In: a graph and its kind (forward, backward or inference). Out: the same graph with slot calls, and its
Schedule.

A slot is a point before a kernel where the program calls the engine, which makes the kernel's tensors
resident. The Schedule lists the slots of a program with their tensors.

    program       insert_slots(), which lists the events of a graph and inserts slot calls
    symbols       the node that binds each symbol of a shape, and nodes that compute sizes in bytes
    materialize   a plan written into the graph: the plan's moves become nodes, and the engine reads no table

Invariant: without an engine, a graph with slots computes the same numbers as the original graph. The
positions of slots depend only on the order of the kernels.

Log lines: "pass slots: ... graph of ..." (debug).
"""
