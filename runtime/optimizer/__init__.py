"""The optimizer's step as a part of the training step. It runs bucket by bucket, within the budget. A bucket
is a small number of parameters that are stepped together.

In: any torch.optim.Optimizer whose step runs. Out: the same numbers as if the optimizer stepped all
parameters together.

    hooks         global hooks of every optimizer's step; `wrap` checks an optimizer before its first step
    strategy      Strategy: how one optimizer may be stepped, and the programs of its steps
    buckets       Bucket: parameters that are stepped together
    slices        some rows of one parameter
    trial         a trial on clones decides whether an optimizer may be stepped in buckets
    step_call     OptimizerCall: one step; before each bucket, the engine makes the bucket's tensors resident
    late_buckets  LateBuckets: the buckets whose updates run in the next forward, or in the backward
    late_step     the optimizer's code for such an update, and the trial that decides whether it may run there
    backward_step  BackwardStep: an update for the next backward, and its comparison with the next `step()`
    host_step     HostStep: steps on the host by torch's fused CPU kernels, with states in host memory

Invariant: an optimizer is stepped in buckets only if its trial succeeded. A trial succeeds if steps in
buckets give the same bits as steps of all parameters together. If a step cannot run in buckets, all tensors
of the optimizer are resident during the step. A warning then reports the reason.

Log lines: "... steps all of its parameters at once", "... steps its largest parameters some rows at a time",
"updates of ... run at step(), not ...".
"""
