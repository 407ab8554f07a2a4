"""Profiles made without running a model: training steps from a roofline model, and the costs of operators.

In: a model's published shape, a request (batch, precision). Out: a Profile.

    profiles         ProfileRequest, and synth(), which makes the profile of a step, kernel by kernel
    models           the layers of well-known models
    tape             operators of the models, forward and backward
    roofline         the duration of a kernel on an accelerator
    operator_costs   floating point operations and bytes of one operator, from shapes

Invariant: the same request gives the same profile. This package measures nothing.
"""
