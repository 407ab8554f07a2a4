"""The memory that is budgeted, and the order in which bytes leave it and come back.

In: storages, and how a copy is started. Out: pending transfers, counts of memory, times of kernels.

    device             Device, the protocol; OrderedDevice, what all kinds share; the four waits, in a picture
    pending_transfer   Ticket, Mark, Pending: a transfer between its beginning and its end
    cpu, cuda          CpuDevice, CudaDevice; `choose` decides which one a process has
    pinned_host        HostTier: copies in pinned memory beside a GPU
    clock              when kernels ran; memory_counts, cuda_memory, rss: what memory is used
    limits             how much memory this process may have
    link_rates         LinkRates: what a way between two tiers carries

Invariant: a storage's memory is neither freed nor used before the copy that needs it has ended (rules 1 to 4
in device.py). No file is touched here, and nothing decides what moves.

Log lines: "torch ... has no way to change its allocator's settings", "this GPU's driver cannot map memory
piece by piece".
"""
