"""Views of plans and timelines in notebooks. In: a plan or a timeline. Out: HTML and text.

The code that draws is in `teraio.report`, on a higher floor. This module names it as text, and loads it when
a notebook shows a value.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar


class ShownInNotebooks:
    """The base class of a file's content that draws itself in a notebook.

    `bundle_function` is the name of the function in `teraio.report.notebook` that draws it.
    """

    __slots__ = ()
    bundle_function: ClassVar[str]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return HTML and text, by MIME type. Notebooks call this method by its name."""
        draw = getattr(import_module("teraio.report.notebook"), self.bundle_function)
        bundle: dict[str, str] = draw(self)
        return bundle
