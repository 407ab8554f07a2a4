"""The runtime of a training step. It moves bytes so that each kernel's tensors are resident in the budget.

In: (1) programs that call slots, (2) user code that reads tensors, and (3) a plan. Out: the same numbers as
without teraio, computed within the budget.

The table lists the packages bottom-up. Each package imports only packages above it in the table.
tests/repo/test_layers.py checks these imports.

    torch_extension   C++ compiled against the installed torch: the observer of reads, the allocator
    device            the budgeted memory, and the order of copies and kernels: CPU, CUDA
    store             files on SSDs: free space, transfers, probes of drives
    ledger            one record per storage: its tier, its holders, admission to the budget
    step              the current call and step, the plan's moves, memory outside of tensors
    eager             user code between programs: fetches for its reads, its gradients, its signals
    engine            a slot: adopt the previous kernel's outputs, follow the plan, make the next kernel's
                      tensors resident
    optimizer         the optimizer step, bucket by bucket, on the device or on the host
    patches           wrappers that replace functions of torch, each found by its name
    model             the construction, loading and saving of models within the budget

Invariant: `passes` never imports `runtime`, and `runtime` never imports `passes`. A plan is data
(teraio.formats.plan).
"""
