"""The SSD tier. It keeps the bytes of evicted tensors in unnamed files, one file per directory.

In: memory addresses and sizes. Out: tickets, which are pending transfers. A transfer ends either with its
bytes in place, or with an error that names the directory.

    store              Store: reserve, write, read, release
    ticket             StoreTicket: wait, cancel, retry a failed write at another place
    space              Space, Extent: the files, their free space, the native transfer engine
    extents            Extents: the allocation of bytes in the files; it accesses no file
    files              the unnamed file of each directory
    directories        the checks of a directory before it is used
    slabs              the buffers between memory and files
    write_rate         the limit of written bytes per day
    source_files       unchanged weights, fetched from the file that they were loaded from
    gds                GPUDirect Storage through kvikio
    gds_support        Obstacle: an unmet requirement of GPUDirect Storage, read from /sys and /proc
    kill_points        points at which tests kill the process
    link_probe         the measurement of a drive's speed
    drive_health       the wear of a drive
    stale_directories  the removal of directories that killed processes left

Invariant: a failed write loses no bytes, because the bytes in memory are freed only after the write has
succeeded. The code of the store does not depend on tensors, plans or budgets.

Log lines: one for each slower mode ("no direct I/O in ...", "... cannot reserve space"), "max_write_per_day:
... are used up".
"""
