"""Slots in an AOTAutograd FX graph that is executed node by node: the inner program `eager`.

In: a graph and its kind. Out: the same graph with slot calls, and its Schedule.

    program       insert_slots: a graph as events, and the calls written into it
    symbols       where each symbol is bound; bytes as nodes of the graph
    materialize   a plan written into the graph: its moves are nodes, and no table is asked

Invariant: without an engine the graph computes the same. Only the order of kernels decides where slots stand.

Log lines: "pass slots: ... graph of ..." (debug).
"""
