"""Slots of a program: places between kernels at which the engine may act, and the schedule that describes
them.

In: a program as events. Out: a Schedule (data for the engine) and the positions where slot calls are printed.

    events              Make, Alias, Forget, Launch; Signature
    layout              lay_slots: events -> Schedule, and a SlotPlace per slot
    recompute_chains    which kernels make a saved output again
    symbolic_sizes      bytes that depend on a program's symbols
    library_workspace   memory that library kernels take while they run
    lifetimes           measured steps -> Profile

Invariant: every slot stands before the memory that its kernel takes is allocated. Its call is handed each
storage that is new since the slot before and needed later, and what its kernel reads or writes.
"""
