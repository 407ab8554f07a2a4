"""Integrations with trainers and loggers of other libraries, one module each.

In: the figures of `teraio.stats()`, and the model of a trainer. Out: a compiled model, and figures in the
log of the other library.

    metrics         Metric: the names, units, kinds and meanings of all figures
    compiled_models compile_and_note, and the reason why a module cannot be compiled
    transformers    TeraioCallback: compiles the model of Hugging Face's Trainer, and adds figures to its log
    lightning       TeraioCallback: does the same for Lightning's Trainer
    step_writer     StepWriter: the base of loggers that write each step
    report_page     the report page of the run's timeline
    tensorboard, wandb            StepWriters for TensorBoard and for Weights & Biases
    prometheus, opentelemetry     figures that a server or an exporter reads when it needs them

Invariant: no module imports the other library before the user uses the module. An integration changes no
number of a training.

Log lines: "TeraioCallback compiles nothing, because ...", "figures may not reach the loggers of report_to",
"no report page: ...", "no further steps are written to it".
"""
