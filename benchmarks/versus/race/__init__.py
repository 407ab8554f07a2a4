"""Races of two trainings, whose steps alternate.

models     the trained models, by name
ways       ways of training: plain, teraio, hand-written hooks or checkpoints, DeepSpeed
trainee    a training in its own process, which runs steps on request
pairs      two alternating trainees, and the evaluation of their times
result     a results file with date and machine, and a bar chart
"""
