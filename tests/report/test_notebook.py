"""Tests of views for notebooks.

A view loads nothing and runs nothing. Names from files appear as plain text. The view of a long step is
small. The figures of a view equal the figures of its value.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import files_made
import pytest
import torch
import toys
from hypothesis import Phase, given, settings

import teraio
from teraio.estimating.answer import Estimate
from teraio.formats.plan import Evict, Fetch, Home, Plan, Predicted
from teraio.formats.timeline import Counter, Span, Stall, Timeline
from teraio.passes.planner.simulate.simulate import simulate
from teraio.report import notebook, notebook_picture, picture_data
from teraio.runtime.step.stats import ShownStats

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'</style>&lt;</title>"
PLAN = Plan(
    "",
    "hand",
    8,
    (Home("a", "ssd"),),
    (Evict("a", "ssd", 4, 1), Fetch("a", "ssd", 6, 9), Evict("b", "ssd", 7)),
    predicted=Predicted(12_000, 11_000, 8),
)
STATS = {
    "step": 3,
    "phase": "planned",
    "step_ns": 2_000_000,
    "step_stall_ns": 500_000,
    "bound_ns": 1_600_000,
    "step_peak_bytes": 3 * 2**20,
    "budget_bytes": 4 * 2**20,
    "step_misses": 7,
    "steady": True,
}
# Every element that a view may have. None of them runs code or loads a file.
ELEMENTS = {
    *("div", "style", "span", "i", "details", "summary", "table", "thead", "tbody", "tr", "th", "td"),
    *("svg", "path", "rect", "title"),
}
ATTRIBUTES = {
    *("class", "style", "scope", "viewbox", "preserveaspectratio", "role", "aria-label"),
    *("d", "fill", "x", "y", "width", "height"),
}
STYLES = re.compile(r"background:var\(--[a-z]+\)|bottom:[0-9.]+%")
SIZE_MAX = 200 * 2**10
# Hypothesis searches no smaller example, because the first failing example is clear enough.
EXAMPLES = settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate])


class Page(HTMLParser):
    """A view as a browser parses it: its elements, their attributes and its text outside of the style."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"elements without an end: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> ends another element"

    def handle_data(self, text: str) -> None:
        if "style" not in self.open:
            self.text += f"{text}\n"


def inert(html: str) -> Page:
    """Parse a view, and assert that its elements and attributes run nothing and load nothing."""
    page = Page(html)
    assert {tag for tag, _ in page.elements} <= ELEMENTS
    for _, attributes in page.elements:
        assert set(attributes) <= ATTRIBUTES
        assert STYLES.fullmatch(attributes.get("style", "bottom:0%"))
        assert re.fullmatch(r"var\(--[a-z]+\)", attributes.get("fill", "var(--x)"))
    assert [tag for tag, _ in page.elements].count("style") == 1
    assert not re.search(r"https?:|url\(|@import|expression\(", html.partition("</style>")[0])
    assert len(html) < SIZE_MAX
    return page


def html_of(value: Any) -> str:
    bundle = value._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    assert all(letter == "\n" or letter.isprintable() for letter in bundle["text/plain"])
    html: str = bundle["text/html"]
    return html


def measured() -> Timeline:
    line = simulate(PLAN_OF_A, toys.diamond(), toys.machine())
    return replace(line, kind="measured", stalls=(Stall(9, "a", 2_000, "late read"),))


PLAN_OF_A = replace(PLAN, moves=PLAN.moves[:2], homes=())


def test_timeline_shows_memory_budget_waits_and_lanes() -> None:
    page = inert(html_of(measured()))
    for words in (
        "One measured step",
        "A step of 12 µs, of which compute waits 2 µs (16.7%).",
        "activations: up to 6 B",
        "budget 8 B",
        "compute waits\n17%",
        "device to SSD\n33%",
        "SSD to device\n33%",
        "peak memory\n6 B\nof 8 B",
        "k9 (tick 9)",
    ):
        assert words in page.text, (words, page.text)
    text = measured()._repr_mimebundle_()["text/plain"]
    assert "a activations   = budget" in text


def test_memory_picture_has_the_heights_of_the_timeline() -> None:
    counters = (Counter("device", "weight", 0, 60), Counter("device", "grad", 1200, 40))
    html = html_of(Timeline("measured", (), counters, (), budget_bytes=100, step_ns=2400))
    # The picture is 1000 high for 105 bytes, and 240 wide for 2400 ns. The 60 bytes reach from 1000 to 429.
    # The 40 bytes above them begin in column 120.
    assert 'd="M0 429h240V1000h-240Z" fill="var(--weight)"' in html
    assert 'd="M0 429h120v-381h120V429h-240Z" fill="var(--grad)"' in html
    assert 'class="line budget" d="M0 48h240"' in html


def test_plan_shows_its_step_bound_and_moves() -> None:
    bundle = PLAN._repr_mimebundle_()
    page = inert(html_of(PLAN))
    for words in (
        "A plan by hand",
        "12 µs",
        "11 µs\nthe step is 9.1% above",
        "evictions\n1\nand 1 drop",
        "evicted between steps\n1 on ssd",
        "device to SSD\nup to 1 at once",
    ):
        assert words in page.text, (words, page.text)
    assert "no plan takes less than: 11 µs (the step is 9.1% above)" in bundle["text/plain"]
    assert "Nothing moves" in inert(html_of(Plan("", "none", 8))).text


def test_moves_in_flight_are_counted_by_slice() -> None:
    spans = [(0, 3), (2, 2), (3, 9)]
    assert notebook_picture._in_flight_by_slice(spans, [0, 1, 2, 3, 4, 10]) == [1, 1, 2, 2, 1]
    # Ticks of a file can be so large that a list with one entry per tick would not fit in memory.
    far = Plan("", "", 8, (), (Evict("a", "ssd", 2**33 - 1, 1),))
    assert "8589934591" in inert(html_of(far)).text


def estimate(plan: Plan | None) -> Estimate:
    why = "" if plan else "memory 5 B is too small"
    profile = replace(toys.diamond(), name=HOSTILE)
    return Estimate(profile, plan, toys.machine(), 8 if plan else 5, 6, 10, why, ("one note",), "by hand")


def test_estimate_shows_memory_and_bound_or_the_reason_for_no_plan() -> None:
    found = estimate(PLAN_OF_A)
    assert found.timeline is not None and found.timeline.step_ns == 12_000
    page = inert(html_of(found))
    for words in (f"{HOSTILE} within 8 B on toy (by hand)", "no plan takes less than\n11 µs", "budget 8 B"):
        assert words in page.text, (words, page.text)
    assert "Transfers of every lane" in page.text and "Assumed: one note." in page.text
    without = estimate(None)
    assert without.timeline is None
    page = inert(html_of(without))
    assert (
        "fits\nno\nmemory 5 B is too small" in page.text
        and "The picture shows the step if nothing moves." in page.text
    )
    assert "activations: up to 10 B" in page.text and "budget 5 B" in page.text
    assert without._repr_mimebundle_()["text/plain"] == str(without)


def test_stats_show_themselves_and_remain_a_dict() -> None:
    page = inert(ShownStats(STATS)._repr_html_())
    for words in (
        "Step 3, next step: planned",
        "2 ms\n500 µs of waiting",
        "the step is 25.0% above",
        "3 MiB\nof 4 MiB",
    ):
        assert words in page.text, (words, page.text)
    quick = {**STATS, "step_ns": 1_000_000}
    assert "1.6 ms\nthe kernels ran faster than in the profile" in inert(ShownStats(quick)._repr_html_()).text
    assert "no program has been compiled yet" in inert(ShownStats({})._repr_html_()).text
    assert isinstance(teraio.stats(), ShownStats)
    shown = ShownStats(STATS)
    assert shown == STATS and json.loads(json.dumps(shown)) == STATS
    assert pickle.loads(pickle.dumps(shown)) == copy.copy(shown) == copy.deepcopy(shown) == STATS
    saved = io.BytesIO()
    torch.save({"stats": shown}, saved)
    saved.seek(0)
    assert torch.load(saved, weights_only=True) == {"stats": STATS}


def test_hostile_names_are_shown_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = (Span("compute", HOSTILE, 0, 1_000), Span(f"fetch:{HOSTILE}", HOSTILE, 0, 500, 4, HOSTILE))
    counters = (Counter("device", HOSTILE, 0, 4), Counter("device", "weight", 0, 1))
    line = Timeline("measured", spans, counters, (Stall(0, HOSTILE, 400, HOSTILE),), 8, 1_000)
    plan = Plan(HOSTILE, HOSTILE, 8, (Home(HOSTILE, HOSTILE),), (Evict(HOSTILE, HOSTILE, 4, 1),))
    for value in (line, plan):
        assert HOSTILE in inert(html_of(value)).text
    for name in ("notebook", "notebook_picture"):
        monkeypatch.setattr(f"teraio.report.{name}.escape", lambda text, quote=True: text)
        with pytest.raises(AssertionError):
            inert(html_of(line))
        monkeypatch.undo()


@EXAMPLES
@given(line=files_made.timelines, plan=files_made.plans)
def test_every_valid_timeline_and_plan_has_an_inert_view(line: Timeline, plan: Plan) -> None:
    inert(html_of(line))
    inert(html_of(plan))


def test_view_of_the_longest_hostile_step_is_small() -> None:
    """Check the size of a view with 400 lanes, kinds and waits, whose names are as long as a file allows."""
    names = [f"{number}{'<' * 250}" for number in range(400)]
    spans = [Span("compute", name, at, at + 1) for at, name in enumerate(names)]
    spans += [Span(f"fetch:{name}", name, at, at + 1, 1, name) for at, name in enumerate(names)]
    counters = [Counter("device", name[:64], at, at) for at, name in enumerate(names)]
    stalls = [Stall(at, name, 1, "miss") for at, name in enumerate(names)]
    line = Timeline("measured", tuple(spans), tuple(counters), tuple(stalls), 10**6, 400)
    page = inert(html_of(line))
    assert picture_data.memory_curve(line).peak_bytes == sum(range(400))
    assert "other kinds" in page.text


@pytest.mark.parametrize(
    ("top", "step"), [(1, 1), (105, 50), (1500, 1024), (40 * 2**30, 10 * 2**30), (67 * 2**20, 20 * 2**20)]
)
def test_axis_has_few_round_marks(top: int, step: int) -> None:
    assert notebook_picture._nice_step_bytes(top) == step


def test_view_keeps_a_text_with_braces() -> None:
    assert "{style}" in inert(notebook.view_as_html(notebook.View("{style}", ()))).text
