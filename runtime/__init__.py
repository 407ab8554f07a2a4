"""The runtime of a training step. It moves bytes so that each kernel's tensors are resident in the budget.

In: (1) compiled programs, which call a slot before each kernel, (2) user code that reads tensors, (3) a plan.
Out: the same numbers as without teraio, computed within the budget.

In the table, each package imports only packages of the rows above it. tests/repo/test_layers.py checks these
imports.

    torch_extension   C++ compiled against the installed torch: the observer of reads, the allocator
    device            the memory that the budget limits, and the order of copies and kernels: CPU, CUDA
    store             files on SSDs: free space, transfers, probes of drives
    ledger            one record for each storage: its tier, its users; room for the storage in the budget
    step              the current call and step, the plan's moves, memory outside of tensors
    eager             user code between programs: fetches for its reads, its gradients, its signals
    engine            a slot: register the previous kernel's outputs, follow the plan, make the next kernel's
                      tensors resident
    optimizer         the optimizer step, bucket by bucket, on the device or on the host
    patches           wrappers that replace functions of torch, each found by its name
    model             the construction, loading and saving of models within the budget

Invariant: `passes` never imports `runtime`, and `runtime` never imports `passes`. Both read the same plan,
which is data (teraio.formats.plan).
"""
