"""The exact planner: parts of a plan as integer programs, solved window by window.

In: a problem, a simulated plan. Out: the same plan or a faster one.

    ilp               the choice of windows, and their order
    windows           the gaps that may change in a window, and the limits of these changes
    integer_program   a window as variables and rows for OR-Tools

Invariant: a window's solution is taken only if it makes the simulated step of the whole plan shorter.
"""
