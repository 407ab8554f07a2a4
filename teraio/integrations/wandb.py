"""The logger for Weights & Biases. In: each step. Out: scalars, and the report of the run.

wandb.init(project="...")
with WandbLogger():
    train(compiled)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from teraio.errors import OptionError

from .report_page import NAME, Report
from .step_writer import StepWriter


class WandbLogger(StepWriter):
    """A logger that writes the figures of each step to a run of Weights & Biases.

    `run` is the result of `wandb.init`, by default the run that is active. The figures have an x axis of
    their own, `teraio/steps`. With `commit=False` they become a part of the row that your next `run.log`
    writes. Use this if your code calls `run.log(..., step=...)`, because its steps must not be smaller than
    the number of rows.
    """

    NAME = "Weights & Biases"

    def __init__(self, run: Any = None, every: int = 1, commit: bool = True) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError(f"WandbLogger needs Weights & Biases ({error}): pip install wandb") from error
        self.wandb, self.commit = wandb, commit
        self.run: Any = wandb.run if run is None else run
        if self.run is None:
            raise OptionError("WandbLogger: no run is active. Call wandb.init() first, or pass its result")
        self.run.define_metric("teraio/steps", hidden=True)
        self.run.define_metric("teraio/*", step_metric="teraio/steps")
        super().__init__(every)

    def write(self, step: int, figures: Mapping[str, int | float]) -> None:
        self.run.log(dict(figures), commit=self.commit)

    def write_report(self, step: int, report: Report) -> None:
        """Log the page as a panel, and as a file of an artifact."""
        page = self.wandb.Html(report.page, inject=False, data_is_not_path=True)
        self.run.log({"teraio/report": page, "teraio/steps": step}, commit=self.commit)
        artifact = self.wandb.Artifact(f"teraio-report-{self.run.id}", type="report")
        with artifact.new_file(NAME, encoding="utf-8") as file:
            file.write(report.page)
        self.run.log_artifact(artifact)
