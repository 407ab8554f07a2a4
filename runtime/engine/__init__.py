"""A slot: what happens between two kernels of a compiled program.

In: the program, the slot's number, the tensors that the kernel before has made, and bytes that the program
holds beside them. Out: everything that the next kernel reads and writes is resident.

    engine           Engine: open_slot, the plan's moves, ensure_resident; the step's end; `program`, which
                     generated code calls
    registry         Registry: which record a tensor has, under a name that it keeps from step to step
    explicit_moves   ExplicitMoves: slots of a program whose graph has the plan's moves in it

Invariant: a plan is a hint and residency is the law. Without a plan, with a stale or a hostile one, the same
code costs time and never correctness. The engine does not plan: a callback gets each measured step.
"""
