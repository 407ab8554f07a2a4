"""Slots in Inductor's generated code. The only package that names torch._inductor.

In: a captured graph. Out: Inductor's compiled program, whose text calls the engine before each kernel.

    codegen     SlottedWrapper, compile_program: slot calls among the wrapper's lines, and the cache key
    lines       wrapper lines written down as events
    calls       branches, loops and subprograms: each counts as one kernel
    options     Inductor's settings: what the user may set, what slots cannot live with
    partition   Inductor's partitioner with some saved tensors computed again

Invariant: the printed program is the plain one but for its slot calls. What decides the text is part of
Inductor's cache key, so no program with other slots comes back.

Log lines: "pass slots: ... program of ..." (debug), "a ... has a wrapper line ... that teraio cannot read".
"""
