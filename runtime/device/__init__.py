"""The budgeted memory, and the order of copies and kernels that use it.

In: storages, and a function that starts a copy. Out: pending transfers, counts of used bytes, times of
kernels.

    device             Device, the protocol; OrderedDevice, the shared part of all devices; the four waits
    pending_transfer   Ticket, Mark, Pending: a transfer between its begin and its end
    cpu, cuda          CpuDevice and CudaDevice
    choose             the choice between CpuDevice and CudaDevice
    pinned_host        HostTier: copies in pinned memory beside a GPU
    clock              clocks for the times of kernels
    memory_counts, cuda_memory, rss    counts of used memory
    limits             the memory that this process may use
    link_rates         LinkRates: the measured rates between two tiers

Invariant: after a copy has begun, the storage's memory is freed or used by kernels only when the copy has
ended (waits 1 to 4 in device.py). This package accesses no file, and it does not decide which tensors move.

Log lines: "torch ... has no way to change its allocator's settings", "this GPU's driver cannot map memory
piece by piece".
"""
