"""Reports of one training step: an HTML page, text, a trace for Perfetto, views for notebooks.

In: a Timeline; optionally a profile, a plan, a machine and a predicted timeline. Out: HTML, text, JSON of
Chrome's trace format. Notebooks also show a plan, an estimate and the figures of a run.

    content         figures, tables and sentences that the page and the text show
    html_page, terminal_text, chrome_trace    the three reports
    notebook, notebook_picture    views for notebooks, and their pictures
    labels          words for lanes, for kinds of tensors and for causes of waits
    picture_data    data of a timeline that pictures need

Invariant: text from a file is only displayed, never executed. Names are escaped, and the page loads nothing.
"""
