"""What runs beside a training step: it moves bytes so that every kernel finds its tensors within the budget.

In: programs that call slots, user code that reads tensors, a plan. Out: the same numbers, within the budget.

Packages, from the floor up. Each imports only what stands before it; tests/repo/test_layers.py checks that.

    torch_extension   C++ compiled against the installed torch: the observer of reads, the allocator
    device            the memory that is budgeted, and the order of copies and kernels: CPU, CUDA
    store             files on SSDs: room in them, transfers, probes of drives
    ledger            one record per storage: where its bytes are, who may move them, what fits
    step              which call of which step runs; the plan's moves; memory that no tensor shows
    eager             user code between programs: what it reads is fetched; gradients; signals
    engine            a slot: take in what a kernel made, follow the plan, make the next kernel's tensors
                      resident
    optimizer         optimizers stepped bucket by bucket, on the device or on the host
    patches           functions of torch that are wrapped by name
    model             models constructed, loaded, saved and kept resident within the budget

Invariant: passes never import the runtime, nor the runtime passes. A plan is data (teraio.formats.plan).
"""
