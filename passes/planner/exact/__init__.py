"""The exact planner. It improves a plan in short ranges of the step (windows), each by an integer program.

In: a problem, a simulated plan. Out: the plan unchanged, or a faster one. A *gap* is an idle interval of a
tensor.

    ilp               the choice of windows, and their order
    windows           the gaps that may change in a window, and the limits of these changes
    integer_program   a window as variables and rows for OR-Tools

Invariant: the solution of a window changes the plan only if the simulated step of the whole plan becomes
shorter.
"""
