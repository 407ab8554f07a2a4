"""What a person sees of a step: one page, lines for a terminal, a trace for Perfetto.

    Timeline (and, where they are there, profile, plan, machine and a predicted timeline)
        -> content.py: figures, tables and words -> html_page.py | terminal_text.py | chrome_trace.py

`labels.py` says what lanes, kinds and causes are called; `picture_data.py` has what pictures need of a
timeline.
"""
