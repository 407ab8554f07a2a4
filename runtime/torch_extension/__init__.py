"""C++ that is compiled against the installed torch, because torch's classes differ between versions.

In: the C++ sources in this folder, and a compiler or the prebuilt libraries of a wheel. Out: two loaded
libraries. Compiled libraries are kept for later runs of teraio.

    prebuilt     loads the prebuilt library of a wheel, if it was built for exactly the installed torch
    build        otherwise compiles a source once per torch version and loads the library
    allocator    makes torch use teraio's CPU allocator, which keeps freed blocks for later tensors
    observer     detects each read of an evicted storage, below Python, and calls the engine to fetch it
                 (observer.cpp; tables: observer_known.h, fences: observer_fences.h, reads: observer_reads.h)

Invariant: teraio also trains without a compiler. It then logs one warning per lost feature. The code in this
package does not depend on records, plans or budgets.

Log lines:

    "torch ... has no prebuilt ...; ... is compiled once for this torch"
    "freed memory goes back to the system at once"
    "weights, gradients and optimizer states are kept resident, because their readers cannot be observed"
"""
