"""The optimizer's step as a part of the training step. The optimizer's step runs bucket by bucket, within the
budget.

In: any torch.optim.Optimizer whose step runs. Out: the same numbers as if the optimizer stepped all
parameters together.

    hooks       global hooks of every optimizer's step; `wrap` checks an optimizer before its first step
    strategy    Strategy: how one optimizer may be stepped, and the programs of its steps
    buckets     Bucket: parameters that are stepped together
    slices      some rows of one parameter
    trial       a trial on clones decides whether an optimizer may be stepped in buckets
    step_call   OptimizerCall: one step, with a slot per bucket
    host_step   HostStep: steps on the host by torch's fused CPU kernels, with states in host memory

Invariant: an optimizer is stepped in buckets only after a trial. In the trial, steps in buckets gave the same
bits as steps of all parameters together. Otherwise all of its tensors are resident for its step, and a
warning reports the reason.

Log lines: "... steps all of its parameters at once", "... steps its largest parameters some rows at a time".
"""
