"""A run, from the first compile to the installed plan: measuring, trial, planned, recompiling.

In: options, compiled programs, measured steps. Out: an engine with a plan, and what the run says of itself.

    session               Session, ensure_session, reset, set_memory, stats: the engine of this process
    tiers                 device, host memory, store: what there is and what links carry
    measured_machine      the machine as a planner sees it
    planning              which plan a measured step gets
    plan_reuse            plans that exist before anything is measured
    recomputation         what is computed again, compiled once more and measured
    host_choice           where optimizers step: device or host
    uncompiled_models     models that sent no graph to the backend
    torch_versions        which torch this is, and whether slots were tried on it
    timeline_recording    the recorder's timeline, to a file
    log_lines, notices    what a run says

Invariant: one session per process; what it opens, `reset` closes.

Log lines: all that describe a run as a whole ("memory ..., ... of it in reserve", "measured step ...",
"planned by ...", "staying in memory: ...").
"""
