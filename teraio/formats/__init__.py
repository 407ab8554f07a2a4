"""The data types of teraio and their files. Nothing in this package imports torch.

In: values, or files from any source. Out: files, or checked values.

    schedule          a compiled program as the engine sees it
    profile           one measured step: kernels, tensors, and the ticks that use each tensor
    machine           tiers, links, and bandwidths that links share
    plan              moves, homes, and tensors to recompute
    timeline          kernels, transfers, memory and stalls of a measured or predicted step
    plan_check        the check of a plan against a profile and a machine
    moves_by_kernel   the moves of a plan, listed by the kernel that they precede
    recompute         (1) the tensors that can be recomputed, (2) the profile of a step that recomputes
    plan_cache        (1) the fingerprint that a plan is valid for, (2) plans kept for later runs
    shipped_files     profiles and machines that come with teraio
    fields, json_text, json_errors, files    field tables; strict JSON; file input and output
    safetensors       headers of weight files

Invariant: the same value is always written as the same bytes. Reading a file that breaks a rule raises one
error, which names the place in the file.
"""
