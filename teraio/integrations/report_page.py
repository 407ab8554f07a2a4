"""The report page of a run, for loggers that keep it beside the figures. In: the files that the options
`timeline` and `profile` name. Out: the page and the report as text, or the reason why there is none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from teraio.errors import TeraioError
from teraio.formats.profile import Profile
from teraio.formats.timeline import Timeline
from teraio.report import content, html_page, terminal_text
from teraio.session import session

WAITS = 8  # number of waits that the text lists
NAME = "teraio-report.html"


@dataclass(frozen=True, slots=True)
class Report:
    """A report of one step of the run, as a page and as text."""

    page: str
    text: str


class RunFiles:
    """The files that the run writes. Their paths are known while the session runs, and used at its end."""

    def __init__(self) -> None:
        self.timeline: str | None = None
        self.profile: str | None = None

    def note_paths(self) -> None:
        running = session.SESSION
        if running is not None:
            self.timeline, self.profile = running.options.timeline, running.options.profile

    def report(self) -> Report | str:
        """Return the report. Without the option `timeline` return an empty text. If the report cannot be
        made, return the reason."""
        if not self.timeline:
            return ""
        try:
            line = Timeline.read(self.timeline)
            profile = Profile.read(self.profile) if self.profile and os.path.exists(self.profile) else None
            sources = content.Sources(line, Path(self.timeline).name, profile, None, None, None)
            made = content.assemble_content(sources, None)
            return Report(html_page.report_as_html(made), terminal_text.report_as_text(made, WAITS))
        except TeraioError as error:
            return str(error)
