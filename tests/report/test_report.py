"""Tests of reports.

The figures match the timeline. The page loads no other files. Names from files appear as plain text.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import files_made
import pytest
import toys
from hypothesis import Phase, given, settings

from teraio.cli import main
from teraio.formats.plan import Evict, Fetch, Plan, Predicted
from teraio.formats.profile import Kernel, Profile, Tensor
from teraio.formats.timeline import Counter, Span, Stall, Timeline
from teraio.passes.planner.simulate.simulate import simulate
from teraio.report import chrome_trace, content, html_page, picture_data, terminal_text

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{title}}&lt;"
PLAN = Plan(
    "", "hand", 8, (), (Evict("a", "ssd", 4, 1), Fetch("a", "ssd", 6, 9)), (), Predicted(12_000, 11_000, 8)
)
# HTML elements that have no end tag.
VOID = {"meta", "input", "link", "img", "br"}


class Page(HTMLParser):
    """A page as a browser parses it. It has the elements with their attributes, and the text inside the
    elements of each tag.

    The constructor raises an AssertionError if an element has no end.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.inside: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open, f"elements without an end: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)
            self.inside.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> ends another element"

    def handle_data(self, text: str) -> None:
        for tag in set(self.open):
            self.inside[tag][-1] += text

    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes in self.elements if "id" in attributes]

    def one(self, name: str) -> dict[str, str]:
        (found,) = [attributes for _, attributes in self.elements if attributes.get("id") == name]
        return found

    def numbers(self) -> Any:
        return json.loads(self.inside["script"][0])


def measured() -> Timeline:
    """Return a measured timeline of the toy profile `diamond`. Its last kernel waits 2 us for the tensor
    `a`.
    """
    line = simulate(PLAN, toys.diamond(), toys.machine())
    stalls = (Stall(9, "a", 2_000, "late read"),)
    return replace(line, kind="measured", stalls=stalls)


def made(line: Timeline, **more: Any) -> Page:
    return Page(
        html_page.report_as_html(content.assemble_content(content.Sources(line, "run.timeline.json", **more)))
    )


@pytest.fixture
def page() -> Page:
    line = simulate(PLAN, toys.diamond(), toys.machine())
    more = {"profile": toys.diamond(), "plan": PLAN, "machine": toys.machine(), "predicted": line}
    return made(measured(), **more)


# ---- the HTML page


def test_page_loads_no_other_resource(page: Page) -> None:
    for tag, attributes in page.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base"}
        assert not {"src", "srcset", "data", "action", "style"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "#").startswith("#")
    style, script = page.inside["style"][0], page.inside["script"][-1]
    for text in (style, script):
        assert not re.search(r"https?:|//[a-z]+\.|url\(|@import|fetch\(|XMLHttpRequest|WebSocket", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", script)


def test_page_policy_allows_only_its_own_style_and_script(page: Page) -> None:
    (policy,) = [a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    found = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for name, text in (("style-src", page.inside["style"][0]), ("script-src", page.inside["script"][-1])):
        assert found[name] == f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    assert found["default-src"] == "'none'"


def test_report_is_keyboard_and_screen_reader_accessible(page: Page) -> None:
    assert len(page.ids()) == len(set(page.ids()))
    references = {"aria-labelledby", "aria-describedby", "aria-controls", "for"}
    for tag, attributes in page.elements:
        for name in references & set(attributes):
            assert set(attributes[name].split()) <= set(page.ids()), (tag, name)
        if tag == "section":
            assert {"aria-label", "aria-labelledby"} & set(attributes)
        if attributes.get("role") == "application":
            assert attributes["tabindex"] == "0" and attributes["aria-label"]
    assert page.one("query")["role"] == "combobox" and page.one("found")["role"] == "listbox"
    assert page.one("selected")["role"] == "status" and page.one("answer")["aria-live"] == "polite"
    html = next(attributes for tag, attributes in page.elements if tag == "html")
    assert html["lang"] == "en"
    assert len(page.inside["h1"]) == 1
    # Each picture also exists as a table. Each table has a caption.
    assert len(page.inside["table"]) == len(page.inside["caption"]) == 6
    assert all(caption for caption in page.inside["caption"])
    style = page.inside["style"][0]
    assert ":focus-visible" in style and "prefers-reduced-motion" in style and "prefers-color-scheme" in style


def test_numbers_of_the_page_equal_the_timeline(page: Page) -> None:
    got, line = page.numbers(), measured()
    assert (got["step"], got["budget"], got["measured"]) == (12_000, 8, True)
    names = got["names"]
    assert [names[name] for name in got["kernels"]["name"]] == [f"k{i}" for i in range(10)]
    assert got["kernels"]["start"] == [span.start_ns for span in picture_data.kernel_spans(line)]
    assert [names[name] for name in got["moves"]["tensor"]] == ["a", "a"]
    assert got["moves"]["bytes"] == [4, 4]
    assert [lane["track"] for lane in got["lanes"]] == ["evict:ssd", "fetch:ssd"]
    assert (got["waits"]["ns"], got["waits"]["tick"]) == ([2_000], [9])
    assert got["tensors"]["reads"] == [[9], [5]] and got["tensors"]["kind"] == ["activation"] * 2
    assert max(map(sum, zip(*got["memory"]["bytes"]))) == 6
    text = " ".join(page.inside["body"][0].split())
    assert "A step of 12 µs, of which compute waits 2 µs (16.7%)." in text
    assert "No plan for this profile takes less than 11 µs; this step takes 1.09 times that." in text


def test_page_of_a_timeline_alone_notes_the_missing_profile() -> None:
    page = made(measured())
    assert page.numbers()["tensors"] is None
    assert "Without --profile" in page.inside["body"][0]
    assert "compared" not in page.ids() and "what-if" not in page.ids()
    other = toys.profile([toys.activation("z", 1, 0, (1,))], 3)
    page = made(measured(), profile=other)
    assert page.numbers()["tensors"] is None and "of another step" in page.inside["body"][0]


def test_hostile_names_are_shown_as_text() -> None:
    spans = (
        Span("compute", HOSTILE, 0, 1_000),
        Span(f"fetch:{HOSTILE}", HOSTILE, 0, 500, 4, HOSTILE),
    )
    counters = (Counter("device", "</style><b>", 0, 4), Counter("device", "__proto__", 0, 1))
    line = Timeline("measured", spans, counters, (Stall(0, HOSTILE, 400, "</title>"),), 8, 1_000)
    profile = Profile(
        HOSTILE, 0, (Kernel(HOSTILE, 0, 1_000),), (Tensor(HOSTILE, "weight", 4, True, (0,), ()),)
    )
    sources = content.Sources(line, HOSTILE, profile)
    plain = made(measured(), profile=toys.diamond())
    page = Page(html_page.report_as_html(content.assemble_content(sources)))
    assert [tag for tag, _ in page.elements if tag == "script"] == ["script"] * 2
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in plain.elements} | {"button"}
    assert page.inside["script"][-1] == plain.inside["script"][-1]
    assert HOSTILE in page.numbers()["names"]
    assert not set("<>&\u2028\u2029") & set(page.inside["script"][0])
    assert (
        HOSTILE in page.inside["title"][0] and HOSTILE in page.inside["caption"][0] + page.inside["table"][-2]
    )
    shown = terminal_text.report_as_text(content.assemble_content(sources))
    assert "\x1b" not in shown and all(c == "\n" or c.isprintable() for c in shown)


def test_missing_escape_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teraio.report.html_page.UNSAFE", {})
    with pytest.raises(AssertionError):
        test_hostile_names_are_shown_as_text()
    monkeypatch.undo()
    monkeypatch.setattr("teraio.report.html_page.escape", lambda text, quote=True: text)
    with pytest.raises(AssertionError):
        test_hostile_names_are_shown_as_text()


# If hypothesis finds a failing example, it does not search for a smaller one. The search would take many more
# examples of about 10 ms, and the first failing example is clear enough.
@settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate])
@given(line=files_made.timelines, other=files_made.timelines, plan=files_made.plans)
def test_every_valid_timeline_has_a_report(line: Timeline, other: Timeline, plan: Plan) -> None:
    found = content.assemble_content(content.Sources(line, "any", toys.diamond(), plan, None, other))
    page = Page(html_page.report_as_html(found))
    assert page.numbers()["step"] == picture_data.step_ns(line)
    assert all(row == "\n" or row.isprintable() for row in terminal_text.report_as_text(found))
    assert json.loads(chrome_trace.timeline_as_trace(line))["otherData"]["kind"] == line.kind


def test_bandwidths_of_links_are_shown_only_with_a_machine() -> None:
    line = measured()
    for machine in (None, toys.machine()):
        lanes = content.assemble_content(content.Sources(line, "t", machine=machine)).lanes
        assert ("the link can" in lanes.head) is (machine is not None)
        assert {len(row) for row in lanes.rows} == {len(lanes.head)}


def test_empty_timeline_has_a_report() -> None:
    page = made(Timeline("predicted"))
    assert "Compute waits for nothing." in page.inside["body"][0]
    assert (
        terminal_text.report_as_text(
            content.assemble_content(content.Sources(Timeline("predicted"), "t"))
        ).count("\n")
        > 2
    )
    assert json.loads(chrome_trace.timeline_as_trace(Timeline("measured")))["traceEvents"]


# ---- the data of pictures


def test_spans_in_a_row_never_overlap() -> None:
    spans = [
        Span("fetch:ssd", "", start, end) for start, end in [(0, 5), (1, 2), (2, 9), (5, 6), (5, 5), (9, 9)]
    ]
    rows = picture_data.assign_rows_without_overlap(spans)
    assert rows == [0, 1, 1, 0, 0, 1] or max(rows) == 1
    for row in set(rows):
        of = sorted((s.start_ns, s.end_ns) for s, r in zip(spans, rows) if r == row)
        assert all(one[1] <= other[0] for one, other in pairwise(of))


def test_wait_ends_at_its_kernel_or_lies_in_user_code() -> None:
    kernels = (Span("compute", "a", 0, 10), Span("compute", "b", 40, 50), Span("compute", "exit", 50, 90))
    stalls = (Stall(1, "x", 20, "miss"), Stall(1, "y", 10, "miss"), Stall(2, "z", 15, "miss"))
    line = Timeline("measured", kernels, (), stalls)
    assert [(w.start_ns, w.end_ns) for w in picture_data.timed_stalls(line)] == [(10, 30), (30, 40), (75, 90)]


def test_a_budget_on_the_edge_of_two_rows_is_drawn_once() -> None:
    counters = (Counter("device", "weight", 0, 0), Counter("device", "weight", 99, 28))
    line = Timeline("measured", (), counters, (), budget_bytes=14, step_ns=100)
    picture = terminal_text.memory_picture(content.assemble_content(content.Sources(line, "t")), height=14)
    assert [row.split()[0] for row in picture.splitlines() if "|=" in row] == ["14"]


def test_shares_of_slices_are_exact() -> None:
    spans = [Span("", "", 0, 10), Span("", "", 5, 20), Span("", "", 30, 35)]
    assert picture_data.busy_ns(spans) == 25
    assert picture_data.covered_share_by_slice(spans, [0, 10, 20, 30, 40]) == [1.0, 1.0, 0.0, 0.5]


def test_no_peak_is_lost_between_two_slices() -> None:
    counters = [Counter("device", "weight", at, size) for at, size in [(0, 1), (5, 9), (6, 2), (25, 3)]]
    held = picture_data.memory_curve(Timeline("measured", (), tuple(counters)))
    assert picture_data.peak_by_slice(held, [0, 10, 20, 30]) == [(9,), (2,), (3,)]


# ---- the trace for Chrome


def test_tracks_of_a_trace_have_no_overlapping_events() -> None:
    spans = (*measured().spans, Span("fetch:ssd", "b", 0, 12_000, 6, "b"))
    line = replace(measured(), spans=spans)
    found = json.loads(chrome_trace.timeline_as_trace(line))
    events = found["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(tracks.values()) == [
        "compute",
        "waiting",
        "evict:ssd (device to SSD)",
        "fetch:ssd (SSD to device)",
        "fetch:ssd (SSD to device) 2",
    ]
    slices = [e for e in events if e["ph"] == "X"]
    for tid in tracks:
        of = [(e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == tid]
        assert of and all(one[1] <= other[0] + 1e-9 for one, other in pairwise(of))
    assert {e["name"] for e in slices if tracks[e["tid"]] == "waiting"} == {"wait: late read"}
    counts = [e for e in events if e["ph"] == "C"]
    assert {e["name"] for e in counts} == {"device bytes"}
    assert max(sum(e["args"].values()) for e in counts) == 6
    assert found["otherData"] == {"budget_bytes": 8, "step_ns": 12_000, "kind": "measured"}


# ---- the report command


def test_report_command_writes_the_requested_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {name: str(tmp_path / f"{name}.json") for name in ("line", "profile", "machine", "plan", "trace")}
    measured().write(paths["line"])
    toys.diamond().write(paths["profile"])
    toys.machine().write(paths["machine"])
    PLAN.write(paths["plan"])
    page = str(tmp_path / "page.html")
    more = ("--profile", paths["profile"], "--plan", paths["plan"], "--machine", paths["machine"])
    assert main.main(["report", paths["line"], *more, "-o", page, "--trace", paths["trace"]]) == 0
    assert capsys.readouterr().out.startswith(f"{page}: toy: one measured step")
    found = Page(Path(page).read_text())
    assert {"compared", "what-if"} <= set(found.ids())
    assert "64 GiB more host memory" in found.inside["body"][0]
    assert json.loads(Path(paths["trace"]).read_text())["displayTimeUnit"] == "ms"
    assert main.main(["report", paths["line"]]) == 0
    text = capsys.readouterr().out
    assert "A step of 12 µs" in text and "= budget" in text and "late read" in text
    assert max(len(row) for row in text.splitlines() if "|" in row) < 100
    assert main.main(["report", paths["line"], *more, "--what-if", "off", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["numbers"]["stall_ns"] == 2_000 and printed["numbers"]["fetch_ssd_bytes"] == 4
    assert printed["tables"]["compared"]["rows"][0] == ["step", "12 µs", "12 µs", "+0.0%"]
    assert main.main(["report", paths["plan"]]) == 2
    assert '"teraio-plan"; expected "teraio-timeline"' in capsys.readouterr().err
    assert main.main(["report", paths["line"], "-o", str(tmp_path / "nowhere" / "page.html")]) == 2
