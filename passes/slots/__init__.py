"""Slots of a program: positions between kernels at which the engine may act, and their schedule.

In: a program as events. Out: a Schedule (data for the engine), and the positions of slot calls in the
program.

    events              the events Make, Alias, Forget, Launch, and the Signature of a program
    layout              lay_slots(), which turns events into a Schedule, and into a SlotPlace for each slot
    recompute_chains    kernels that recompute an output that the forward saves for the backward
    symbolic_sizes      sizes in bytes that depend on a program's symbols
    library_workspace   memory that library kernels allocate while they run
    lifetimes           the Profile of measured steps

Invariant: every slot is before the allocations of its kernel. The slot call gets two groups of tensors: (1)
the arguments and outputs that the kernel reads or writes, (2) each output made since the previous slot.
"""
