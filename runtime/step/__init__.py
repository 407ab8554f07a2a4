"""The training step as a sequence of calls and ticks, with the plan's moves at each tick. A call is one run
of a compiled program or one optimizer step. A slot is a point in a program before a kernel. A tick is the
number of a slot in the whole step.

In: the calls of programs. Out: (1) measured steps, (2) the plan's moves for a tick.

    program            Program: the tables of a schedule, which a slot can read fast
    composed_program   a program with further slots, at which late updates run
    tracker            StepTracker, Expectation: the place of each call in the step
    plan_table         a plan as a table, tick -> operations
    plan_follower      PlanFollower: the plan's moves, carried out at the slots of their ticks
    prefetch           Prefetch: fetches before user code touches the tensors, in the last step's order
    eager_memory       EagerMemory: bytes that user code takes between two programs
    kernel_workspace   KernelWorkspace: bytes that kernels take beside their tensors
    late_frees         LateFrees: the wait for tensors that a collective's thread frees late
    quiet_call         QuietCall: calls in which no tensor has to move
    stats              Stats, StepMeter: figures of the last step

Invariant: a planned move that is impossible now is skipped and counted. It is never an error. If a step
differs from all earlier steps, it still runs, with fetches on demand.

Log lines: "step ...: ... of waiting; misses: ...".
"""
