"""Slots in Inductor's generated code. Only this package imports torch._inductor.

In: a captured graph. Out: Inductor's compiled program, whose text calls the engine before each kernel. Such a
call is a *slot*: the engine makes the kernel's tensors resident.

    codegen     SlottedWrapper and compile_program: slot calls among the wrapper's lines, and the cache key
    lines       a reader that turns wrapper lines into events: new storages, their names, and kernels
    calls       branches, loops and subprograms, each of which counts as one kernel
    options     Inductor's settings: settings that the user may set, and settings that slots do not work with
    partition   Inductor's partitioner with some saved tensors recomputed

Invariant: the printed program is Inductor's plain program with slot calls added. Every input that changes the
text is part of Inductor's cache key, so the caches never return a program with other slots.

Log lines: "pass slots: ... program of ..." (debug), "a ... has a wrapper line ... that teraio cannot read".
"""
