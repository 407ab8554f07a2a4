"""The session: the run of one process, from the first compile to the plan that all further steps follow.

In: options, compiled programs, measured steps. Out: an engine with a plan, log lines of the run.

    session               Session, ensure_session, reset, set_memory, stats: the engine of this process
    tiers                 device, host memory, store: their sizes, and the rates of the links between them
    host_shares           the parts of this host that belong to one of its ranks
    measured_machine      the machine that planners get
    course                Course, Phase: the states of one kind of step: measuring, planning, a trial, a plan
    planning              Planning: the choice of a plan for a measured step
    plan_choice           Choice: a choice that waits for a planner process while steps go on
    plan_reuse            the plan file, and the plans of earlier runs
    collective_waits      durations of collectives without the wait for other ranks
    rank_checks           the comparison with the other ranks of a training
    recomputation         the tensors that the backward recomputes
    host_choice           the place of optimizer steps: device or host
    late_choice           the updates that run in the next forward, chosen by a comparison of measured steps
    uncompiled_models     compiled models that sent no graph to the backend
    torch_versions        the check of the installed torch: by a list of versions, or by a self-test
    timeline_recording    the recorder's timeline, written to a file
    log_lines, notices    texts of log lines and warnings

Invariant: a process has at most one session, and `reset` closes everything that the session opened.

Log lines: all lines that describe a run as a whole ("memory ..., ... of it in reserve", "measured step ...",
"planned by ...", "kept resident: ...").
"""
