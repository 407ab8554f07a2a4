"""What a person sees of a step: one page, lines for a terminal, a trace for Perfetto.

In: a Timeline; where they are there, a profile, a plan, a machine and a predicted timeline. Out: HTML, text,
JSON of Chrome's trace format.

    content         figures, tables and words, for all of them
    html_page, terminal_text, chrome_trace    the three that people open
    labels          what lanes, kinds and causes are called
    picture_data    what pictures need of a timeline

Invariant: nothing in a file is obeyed: names are escaped, and the page loads nothing.
"""
