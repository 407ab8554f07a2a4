"""Functions of torch that are wrapped by name, once per process: those that the observer cannot serve.

In: calls of torch's own functions. Out: the same results, with evicted tensors fetched one at a time.

    wrapped_functions   reads of storages in C++, lists of tensors, addresses that are handed out
    pickling            torch.save writes evicted tensors one by one
    cuda_graphs         what a CUDA graph has captured stays resident

Invariant: without an engine every function does what torch's does. A function that the observer sees is not
wrapped.

Log lines: "... tensors (...) stay in memory from now on: a CUDA graph has their addresses".
"""
