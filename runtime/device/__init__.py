"""The memory that the budget limits (RAM or a GPU's memory), and the order of copies and kernels that use it.

In: storages, and a function that starts a copy. Out: pending transfers, counts of used bytes, times of
kernels.

    device             Device: the interface; OrderedDevice: the shared part of all devices; the four waits
                       that order copies and kernels
    pending_transfer   Ticket, Mark, Pending: a transfer between its begin and its end
    cpu, cuda          CpuDevice and CudaDevice
    choose             the choice between CpuDevice and CudaDevice
    pinned_host        HostTier: copies in pinned memory beside a GPU
    clock              clocks for the times of kernels
    memory_counts, cuda_memory, rss    counts of used memory
    limits             the memory that this process may use
    link_rates         LinkRates: the measured rates between two tiers

Invariant: until the copy of a storage has ended, the storage's memory is not freed, and no kernel writes it.
During a fetch, no kernel reads the memory either. Waits 1 to 4 in device.py ensure this. The package accesses
no file. It does not decide which tensors move.

Log lines: "torch ... has no way to change its allocator's settings", "this GPU's driver cannot map memory
piece by piece".
"""
