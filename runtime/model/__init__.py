"""Whole models within the budget: constructed, loaded, saved, kept resident for a block.

In: modules, optimizers, files. Out: models whose weights may be larger than memory from their first line on.

    init       Construction: what a module is given may leave at once
    load       weights of safetensors files, read when a kernel needs them
    save       teraio.save, a tensor at a time, never half a file
    resident   `with teraio.resident(model)`: everything in memory for the block

Invariant: a file is written whole or not at all, byte for byte what torch writes. Nothing here plans.
"""
