"""The exact planner: parts of a plan as integer programs, solved window by window.

In: a plan, simulated; a problem. Out: the same plan or a faster one.

    ilp               which windows are solved, in which order
    windows           what may change in a window, and what is free in it
    integer_program   a window as variables and rows for OR-Tools

Invariant: a window's solution is taken only if the whole plan got faster by simulation.
"""
