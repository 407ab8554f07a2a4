"""The training step as a sequence of calls and ticks: which one runs, what the plan does there.

In: programs as they run. Out: measured steps, and for a tick the plan's moves.

    program            Program: a schedule, read once into tables that a slot can use fast
    tracker            StepTracker, Expectation: which call of which step is this
    plan_table         a plan as operations by tick; plan_follower carries them out
    prefetch           Prefetch: what user code read in the last step arrives before it is read
    eager_memory       EagerMemory: bytes that user code takes between two programs
    kernel_workspace   KernelWorkspace: bytes that kernels take beside their tensors
    quiet_call         QuietCall: calls in which nothing has to move
    stats              Stats, StepMeter: the last step in numbers

Invariant: a move that does not fit what is resident is skipped and counted, never an error. A step that
differs from every expectation still runs, on demand.

Log lines: "step ...: ... of waiting; misses: ...".
"""
