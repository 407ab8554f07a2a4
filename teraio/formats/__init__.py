"""The data types of teraio and their files. Nothing in this package imports torch.

In: values, or files from any source. Out: files, or checked values.

    schedule          a compiled program with its slots, the points at which the engine acts
    profile           one measured step: kernels, tensors, and the kernels that use each tensor
    machine           memory tiers, links, and bandwidths that links share
    plan              moves and homes of tensors, and tensors to recompute
    timeline          kernels, transfers, memory and waits of a measured or predicted step
    plan_check        the check of a plan against a profile and a machine
    moves_by_kernel   the moves of a plan, listed by the kernel that they precede
    recompute         (1) the tensors that can be recomputed, (2) the profile of a step that recomputes
    updates           (1) the updates that can run at other places, (2) the profile of such a step
    planned_step      the profile of the step that a plan is for
    plan_cache        (1) the fingerprint of a step, which a plan names, (2) plans kept for later runs
    shipped_files     profiles and machines that come with teraio
    fields, json_text, json_errors, files    tables of fields; strict JSON; file input and output
    safetensors       headers of weight files
    notebook_view     views of plans and timelines in notebooks; teraio.report draws them

Invariant: equal values are always written as equal bytes. Reading a file that breaks a rule raises one error,
which names the place in the file.
"""
