"""What a person sees of a step: one page, lines for a terminal, a trace for Perfetto.

    Timeline (and, where they are there, profile, plan, machine and a predicted timeline)
        -> told.py: figures, tables and words -> onepage.py | terminal.py | chrome.py

`words.py` says what lanes, kinds and causes are called; `shape.py` has what pictures need of a timeline.
"""

from teraio.report.chrome import trace
from teraio.report.onepage import page
from teraio.report.terminal import text
from teraio.report.told import Content, Sources, Table, content, figures

__all__ = ["Content", "Sources", "Table", "content", "figures", "page", "text", "trace"]
