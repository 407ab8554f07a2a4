"""Races: trainings against each other, step by step.

models     the trained models, by name
ways       ways of training: plain, teraio, hand-written hooks or checkpoints, DeepSpeed
trainee    a training in its own process, which takes as many steps as requested
pairs      two alternating trainees, and the evaluation of their times
result     a results file with date and machine, and a bar chart
"""
