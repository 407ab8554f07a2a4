"""Will it fit, how fast, and what must go where: before there is anything to train.

In: a model, a batch, an optimizer, options. Out: an Estimate, with a profile and a plan.

    estimate         estimate: the public function
    fake_tensors     copies of model, batch and optimizer without their bytes
    dry_run          one training step on fake tensors, by the programs and slots of a real one
    optimizer_step   the optimizer's step on fake parameters
    machines         which machine, and how fast it computes
    answer           Estimate: figures and text
    torch_errors     what went wrong inside of torch, in one line

Invariant: with the inner program `eager` the kernels, tensors and bytes are those that a run measures.
Inductor fuses some, which the answer says. No weight is allocated.

The package is not called `estimate`: teraio.estimate is the function.
"""
