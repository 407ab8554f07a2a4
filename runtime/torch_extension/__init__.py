"""C++ that is compiled against the installed torch, because torch's classes differ from version to version.

In: the sources beside this page, and a compiler. Out: two shared libraries, kept from run to run.

    build        compiles a source once per torch and returns the library
    allocator    torch's CPU allocator over ours: freed blocks are kept for the next tensors
    observer     sees every read of an evicted storage below Python and asks its owner to fetch it
                 (observer.cpp; its tables in observer_known.h, fences in observer_fences.h, reads in
                 observer_reads.h)

Invariant: without a compiler teraio still trains; each loss is said once. Nothing here knows records, plans
or budgets.

Log lines: "freed memory goes back to the system at once", "weights, gradients and optimizer states stay in
memory, because nobody would see who reads them".
"""
