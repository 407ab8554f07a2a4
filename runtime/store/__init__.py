"""The SSD tier: bytes of evicted tensors in files without a name, one file per directory.

In: addresses and sizes. Out: tickets, which end with the bytes in place or with an error that names the
drive.

    store              Store: reserve, write, read, release
    ticket             StoreTicket: wait, cancel, a second try elsewhere
    space              Space, Extent: the files, the room in them, the native engine that moves bytes
    extents            Extents: which bytes of which file are free; numbers only
    files, directories the files themselves, and whether a directory can hold one
    slabs, write_rate  buffers between memory and files; a cap on bytes written per day
    source_files       weights whose copy is the file that they were loaded from
    gds                GPUDirect Storage through kvikio
    kill_points       points at which tests kill the process
    link_probe, drive_health, stale_directories    speed of a drive, its wear, what killed processes left

Invariant: a write that failed has lost nothing, because the bytes in memory are freed only after it
succeeded. The store does not know tensors, plans or budgets.

Log lines: every fallback, once ("no direct I/O in ...", "... cannot reserve space"), "max_write_per_day: ...
are used up".
"""
