"""One record per storage: whose bytes it has, where they are, and whether they may move.

In: needs of kernels and user code, moves of a plan. Out: storages that are resident, within the budget.

    record               Record, State: on the device, leaving, evicted, arriving
    mover                Mover: begin and end of one record's eviction and fetch
    residency            Residency: the law; what must be resident is, and it fits
    pending_evictions    PendingEvictions: writes whose bytes are already counted as free
    device_shortage      DeviceShortage: fetches where the device has less memory than the budget
    adoption             storages that cannot be emptied in place get bytes that can
    unresizable          Unresizable: weights that stay because something else has their bytes
    known_tensors        KnownTensors: tensors by which programs and optimizers know a storage
    restore              fetches of everything, whatever the budget
    recorder             Recorder: what a timeline shows
    engine_lock          EngineLock: one thread works in the engine at a time
    resident_reasons, shared_mappings    why a tensor stays, for errors; memory that other processes write

Invariant: resident bytes, those in flight and the reserve are at most the budget, or the excess is said. The
ledger asks no plan: without one it evicts by furthest next use.

Log lines: "the device has no memory for", "... stays in memory, others take its place", "numpy had ...
again".
"""
