"""Trainings against each other, step by step.

models     what is trained, by name
ways       how: plainly, by teraio, with hooks or checkpoints by hand, by DeepSpeed
trainee    one of them in a process of its own, which takes as many steps as it is asked for
pairs      two trainees in turn, and what their times say
result     a file with date and machine, and a picture of it
"""
