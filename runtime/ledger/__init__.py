"""The ledger: one record per storage. A record has the place of the storage's bytes, and a flag that is True
if the bytes may move.

In: (1) the storages that kernels and user code need, (2) the moves of a plan. Out: these storages are
resident, within the budget.

    record               Record, State: resident, evicting, evicted, fetching
    mover                Mover: begin and end of one record's eviction and fetch
    residency            Residency: the law, which makes needed storages resident within the budget
    pending_evictions    PendingEvictions: evictions in flight whose bytes already count as free
    adoption             copies of storages' bytes to memory that can be emptied in place
    unresizable          Unresizable: records that cannot be emptied in place, and the attempts to adopt them
    keep_option          KeepOption: names of tensors that are always resident
    known_tensors        KnownTensors: the tensors with which programs and optimizers access a storage
    restore              fetches of all evicted records, whatever the budget
    recorder             Recorder: events of a step, for a timeline
    engine_lock          EngineLock: one thread works in the engine at a time
    resident_reasons     reasons why tensors are resident, for errors
    shared_mappings      memory that other processes may write

Invariant: the sum of resident bytes, bytes in flight and the reserve is at most the budget, or else an
overrun is reported. Only methods of Record change a record. The ledger reads no plan. If a kernel needs room
that no planned move makes, the ledger evicts the records with the furthest next use.

Log lines: "the device has no memory for", "... is kept resident, others are evicted instead", "... was
exported to numpy again", "overrun: ... needs ... more than the memory".
"""
