"""Slots: the engine's work between two kernels of a compiled program.

In: the program, the slot's number, the tensors that the previous kernel has made, and the bytes that the
program holds beside them. Out: every tensor that the next kernel reads or writes is resident.

    engine           Engine: the two halves of a slot, the plan's moves between them, the end of a step; and
                     `program`, which generated code calls
    registry         Registry: it finds a tensor's record, whose name is the same in each step
    explicit_moves   ExplicitMoves: it runs the slots of a program whose graph contains the plan's moves

Invariant: a plan is a hint and residency is the law. Without a plan, or with a stale or hostile plan, the
same code takes more time and is still correct. The engine makes no plans. A callback gets each measured step.
"""
