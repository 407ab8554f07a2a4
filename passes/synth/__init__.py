"""Profiles without a run: training steps by roofline, and what operators cost.

In: a model's published shape, a request (batch, precision). Out: a Profile.

    profiles         ProfileRequest, synth: a step, kernel by kernel
    models           models that people recognise; tape: their operators, forward and backward
    roofline         how long a kernel takes on an accelerator
    operator_costs   operations and bytes of one operator, from shapes

Invariant: the same request gives the same profile. Nothing here is measured.
"""
