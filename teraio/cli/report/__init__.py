"""Reports of one step: an HTML page, text for a terminal, a trace for Perfetto.

In: a Timeline; optionally a profile, a plan, a machine and a predicted timeline. Out: HTML, text, JSON of
Chrome's trace format.

    content         figures, tables and sentences of all three reports
    html_page, terminal_text, chrome_trace    the three reports
    labels          words for lanes, kinds and causes
    picture_data    data of a timeline that pictures need

Invariant: text from a file is only shown. Names are escaped, and the page loads nothing.
"""
