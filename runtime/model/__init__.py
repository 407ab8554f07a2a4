"""Whole models within the budget: their construction, loading and saving. A `with` block keeps a whole model
resident.

In: modules, optimizers, files. Out: models that may be larger than memory, even while they are constructed.

    init       Construction: a tensor may be evicted as soon as it is assigned to a module
    load       weights of safetensors files; the engine reads a weight when a kernel needs it
    save       teraio.save, which writes one tensor at a time and never leaves a partial file
    resident   `with teraio.resident(model)`: all tensors of the model are resident in the block

Invariant: a saved file is either complete or not written at all. torch.save would write the same bytes. This
package makes no plan for evictions and fetches.
"""
