"""The ledger: one record for each storage. A record states where the storage's bytes are, and whether they
may move.

In: (1) the storages that kernels and user code need, (2) the moves of a plan. Out: these storages are
resident, within the budget.

    record               Record, State: resident, withheld, evicting, evicted, fetching
    mover                Mover: begins and ends the eviction or fetch of one record
    residency            Residency: the rule that makes needed storages resident within the budget
    expected_uses        ExpectedUses: the next use of a tensor, for the choice of the records to evict
    owed_tensors         OwedTensors: tensors whose update is owed, and whose bytes are withheld
    pending_evictions    PendingEvictions: evictions in flight whose bytes already count as free
    adoption             copies of storages' bytes to memory that can be emptied in place, as evictions need
    unresizable          Unresizable: records that cannot be emptied in place, and attempts at their adoption
    keep_option          KeepOption: names of tensors that are always resident
    known_tensors        KnownTensors: the tensors with which programs and optimizers access a storage
    restore              fetches of all evicted records, even beyond the budget
    recorder             Recorder: events of a step, for a timeline
    engine_lock          EngineLock: only one thread at a time works in the engine
    resident_reasons     reasons why tensors are resident, for the texts of errors
    shards               `local_tensor`: the tensor that has the bytes of a DTensor
    shared_mappings      memory that other processes may write

Invariant: the resident bytes, the bytes in flight and the reserve together are at most the budget. Otherwise
a warning reports an overrun. Only methods of Record change a record. The ledger does not read the plan. If a
kernel needs more room than the planned moves make, the ledger evicts the records whose next use is furthest.

Log lines: "the device has no memory for", "... is kept resident, others are evicted instead", "... was
exported to numpy again", "overrun: ... needs ... more than the memory", "... of ... are not sharded".
"""
