"""Data: what a run measures, what a planner decides, and how both look in files. No torch.

In: values, or files that anybody may have written. Out: files, or checked values.

    schedule          a compiled program as the engine sees it
    profile           what was measured: kernels, tensors, ticks that touch them
    machine           tiers, links, what links share
    plan              what was decided: moves, homes, what is computed again
    timeline          what happened or is predicted, span by span
    plan_check        does this plan keep its promises?
    moves_by_kernel   a plan spelled out before each kernel
    recompute         which tensors can be computed again; a profile with some of them
    plan_cache        the identity that a plan is valid for; plans kept from run to run
    shipped_files     profiles and machines that come with teraio
    fields, json_text, json_errors, files    field tables; strict JSON; reading and writing
    safetensors       headers of weight files

Invariant: the same value gives the same bytes. A file that breaks a rule is one error that names the place.
"""
