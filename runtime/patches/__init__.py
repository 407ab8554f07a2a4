"""Wrappers of the torch functions that the observer cannot serve. A wrapper takes the place of the function,
under the function's name.

In: calls of torch's own functions. Out: the same results. Evicted tensors are fetched one at a time.

    wrapped_functions   functions that read storages in C++, take lists of tensors, or give away addresses
    pickling            torch.save, which then fetches evicted tensors one at a time
    cuda_graphs         the capture of CUDA graphs; the captured tensors are kept resident

Invariant: without an engine, every wrapped function does what torch's function does. A function that the
observer sees is not wrapped.

Log lines: "... tensors (...) are kept resident from now on: a CUDA graph has their addresses".
"""
