"""What happens at compile time: where slots stand, and which plan a step gets.

In: graphs that torch captured; profiles. Out: programs with slots and their schedules; plans.

    capture    what AOTAutograd hands over: kinds of arguments, where the joint graph is cut
    slots      where slots stand in a program, and the schedule that the engine gets
    fx         slots in an FX graph that is executed in order (inner program `eager`)
    inductor   slots in Inductor's wrapper lines (inner program `inductor`)
    selftest   whether slots work on this torch
    planner    plans from profiles: bounds, heuristics, an integer program, simulators
    synth      profiles of models by roofline, without running them

Invariant: nothing here imports the runtime. A schedule and a plan are data (teraio.formats).
"""
