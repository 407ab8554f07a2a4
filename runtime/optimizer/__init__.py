"""The optimizer's step as calls of the training step: bucket by bucket, within the budget.

In: any torch.optim.Optimizer whose step runs. Out: the same numbers as a step of all parameters at once.

    hooks       global hooks that find every optimizer; `wrap` for what torch does not tell of
    strategy    Strategy: what is known of one optimizer, and the programs that its steps are
    buckets     Bucket: parameters that are stepped together; slices: some rows of one parameter
    trial       whether an optimizer may be stepped in buckets, tried on clones
    step_call   OptimizerCall: one step; a slot per bucket
    host_step   HostStep: steps whose states are in host memory, by torch's fused CPU kernels

Invariant: an optimizer is stepped in buckets only after a trial gave the same bits. Otherwise all of its
tensors are resident for its step, and that is said.

Log lines: "... steps all of its parameters at once", "... steps its largest parameters some rows at a time".
"""
