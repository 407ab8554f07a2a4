"""Wrappers of torch functions for which the observer is not enough. The observer detects each read of an
evicted tensor by an operator, so that the engine can fetch the tensor. A wrapper takes the place of torch's
function, under the function's name.

In: calls of torch's own functions. Out: the same results. Evicted tensors are fetched one at a time.

    wrapped_functions   functions that read storages in C++, take lists of tensors, or pass addresses on
    pickling            torch.save, which then fetches evicted tensors one at a time
    cuda_graphs         the capture of CUDA graphs; the captured tensors are kept resident

Invariant: without an engine, every wrapped function does what torch's function does. A function for which the
observer is enough is not wrapped.

Log lines: "... tensors (...) are kept resident from now on: a CUDA graph has their addresses".
"""
