"""Estimates of memory, step time and transfers of a training step, without training.

In: a model, a batch, an optimizer, options. Out: an Estimate, with a profile and a plan.

    estimate         estimate: the public function
    fake_tensors     copies of model, batch and optimizer that have no bytes
    dry_run          a simulated training step on fake tensors
    optimizer_step   the optimizer's part of the simulated step
    machines         the machine of the estimate, and its compute rates
    answer           Estimate: the result, as figures and as text
    torch_errors     one-line reasons of errors inside torch

Invariant: an estimate has the same kernels, tensors and bytes as a measured step with `inner="eager"`.
Inductor fuses some kernels, and a note in the answer says so. An estimate allocates no weight.

The package is not named `estimate`, because `teraio.estimate` is the public function.
"""
