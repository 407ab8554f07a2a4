"""Reports of one training step: an HTML page, text for a terminal, and a trace for Perfetto.

In: a Timeline; optionally a profile, a plan, a machine and a predicted timeline. Out: HTML, text, JSON of
Chrome's trace format.

    content         figures, tables and sentences that the page and the text show
    html_page, terminal_text, chrome_trace    the three reports
    labels          words for lanes, for kinds of tensors and for causes of waits
    picture_data    data of a timeline that pictures need

Invariant: text from a file is only displayed, never executed. Names are escaped, and the page loads nothing.
"""
