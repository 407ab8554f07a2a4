"""The part of teraio that runs at compile time. It inserts slots into programs and plans the moves of a step.

A *slot* is a point before a kernel where the program calls the engine. A *move* is an eviction, a fetch or a
drop of a tensor.

In: graphs that torch captured, and profiles. Out: programs with slots, their schedules, and plans.

    capture    metadata of AOTAutograd, and the cut of the joint graph into forward and backward
    slots      positions of the slots in a program, and the schedule for the engine
    fx         slots in an FX graph that runs node by node (inner program `eager`)
    inductor   slots in Inductor's wrapper lines (inner program `inductor`)
    selftest   a test whether slots work on the installed torch
    planner    plans from profiles: bounds, heuristics, an integer program, simulators
    synth      profiles of models that never ran, with times from a roofline model

Invariant: no module of this package imports the package `runtime`. The runtime receives schedules and plans
as objects of the classes in `teraio.formats`.
"""
