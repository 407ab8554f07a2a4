"""The logger for TensorBoard. In: each step. Out: scalars, and the report of the run.

with TensorBoardLogger("runs"):
    train(compiled)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .report_page import NAME, Report
from .step_writer import StepWriter


class TensorBoardLogger(StepWriter):
    """A logger that writes the figures of each step as scalars.

    `writer` is a SummaryWriter, or the folder for a new one. At the end, the report of the run is a text in
    TensorBoard and a page in the folder, if the option `timeline` is set.
    """

    NAME = "TensorBoard"

    def __init__(self, writer: Any = None, every: int = 1) -> None:
        self.is_own = writer is None or isinstance(writer, str | os.PathLike)
        self.writer = _make_writer(writer) if self.is_own else writer
        super().__init__(every)

    def write(self, step: int, figures: Mapping[str, int | float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def write_report(self, step: int, report: Report) -> None:
        path = Path(self.writer.get_logdir(), NAME).absolute()
        path.write_text(report.page, encoding="utf-8")
        indented = "\n".join(f"    {line}" for line in report.text.splitlines())
        self.writer.add_text("teraio/report", f"The page of this report: {path}\n\n{indented}", step)

    def close(self) -> None:
        super().close()
        if self.is_own:
            self.writer.close()
        else:
            self.writer.flush()


def _make_writer(folder: Any) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"TensorBoardLogger needs TensorBoard ({error}): pip install tensorboard"
        ) from error
    return SummaryWriter(folder)
