"""Slots: the engine's work between two kernels of a compiled program.

In: the program, the slot's number, the tensors that the previous kernel has made, and the bytes that the
program holds beside its registered tensors. Out: every tensor that the next kernel reads or writes is
resident.

    engine           Engine: runs the slots and the plan's moves, and ends steps; `program`, which generated
                     code calls
    registry         Registry: finds or makes the record of a tensor. A tensor's record has the same name in
                     each step.
    late_updates     LateUpdates: updates that `step()` puts off, and the slots at which they run
    backward_updates BackwardUpdates: updates that run as soon as their gradients are final, for
                     `updates="backward"`
    explicit_moves   ExplicitMoves: runs the slots of a program whose graph contains the plan's moves

Invariant: a plan is only a hint. Without a plan, or with a stale or hostile plan, each kernel's tensors are
still resident, but the step takes more time. The engine makes no plans. A callback gets each measured step.
No code uses a tensor whose update is owed: the update runs first. Between an update in the backward and
`step()`, no code uses a tensor of the update: it gets an error.

Log lines: "... runs at step() again, not in the next forward", "... runs at step(), not in the backward".
"""
