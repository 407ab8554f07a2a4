"""Slots in an AOTAutograd FX graph that is executed node by node: the inner program `eager`.

In: a graph and its kind. Out: the same graph with slot calls, and its Schedule.

    program       insert_slots(), which lists the events of a graph and inserts slot calls
    symbols       the node that binds each symbol, and sizes in bytes as nodes of the graph
    materialize   a plan written into the graph: the plan's moves become nodes, and the engine reads no table

Invariant: without an engine, a graph with slots computes the same numbers as the original graph. The
positions of slots depend only on the order of the kernels.

Log lines: "pass slots: ... graph of ..." (debug).
"""
