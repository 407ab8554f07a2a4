"""Whole models within the budget: their construction, loading and saving, and a `with` block that keeps them
resident.

In: modules, optimizers, files. Out: models that may be larger than memory, even while they are constructed.

    init       Construction: a tensor may be evicted as soon as it is assigned to a module
    load       weights of safetensors files; the engine reads a weight when a kernel needs it
    save       teraio.save, which writes one tensor at a time and never leaves a partial file
    resident   `with teraio.resident(model)`: all tensors of the model are resident in the block

Invariant: a saved file is either complete or not written at all. Its bytes are the same as in a file that
torch writes. No module of this package makes a plan.
"""
