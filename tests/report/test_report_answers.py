"""Tests of two parts of a report's page: the search for tensors, and the answers to questions about a tensor.

Node runs the page's scripts without a browser.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest
import toys

from teraio.formats.plan import Evict, Fetch, Plan
from teraio.formats.profile import Kernel, Profile, Tensor
from teraio.formats.timeline import Span, Stall, Timeline
from teraio.report import content, html_page

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")

UP = "layers.7.mlp.up_proj.weight"
MOMENT = f"{UP}.exp_avg_sq"
NAMES = (UP, f"{UP}.exp_avg", MOMENT, f"{UP}.grad", "layers.17.mlp.up_proj.weight.exp_avg_sq", "0.mul_2")


def ask(sources: content.Sources, expression: str) -> Any:
    """Return the value of a JavaScript expression, evaluated after the page's scripts were loaded."""
    numbers = json.dumps(html_page._data_for_page_scripts(sources))
    folder = files("teraio.report") / "assets"
    script = "\n".join((folder / name).read_text() for name in ("format.js", "model.js", "answer.js"))
    page = f"const document = {{ getElementById: () => ({{ textContent: {json.dumps(numbers)} }}) }};"
    program = f"{page}\n{script}\nconsole.log(JSON.stringify({expression}));"
    ran = subprocess.run(["node", "-"], input=program, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def sources() -> content.Sources:
    """Return the data of a report with ten kernels of 1 us each.

    The tensor MOMENT begins the step evicted. A fetch of it begins at 6 us, a kernel uses it at 8 us, and an
    eviction begins at 9 us. Compute waits for one fetch that no plan contains (a miss).
    """
    kernels = [Span("compute", f"k{tick}", tick * 1_000, tick * 1_000 + 1_000) for tick in range(10)]
    moves = [
        Span("fetch:ssd", MOMENT, 6_000, 7_000, 4, MOMENT),
        Span("evict:ssd", MOMENT, 9_000, 9_500, 4, MOMENT),
        Span("evict:ssd", "0.mul_2", 2_000, 2_500, 8, "0.mul_2"),
        Span("drop:ssd", UP, 3_000, 3_000, 0, UP),
        Span("fetch:ssd", UP, 4_500, 5_000, 8, UP),
    ]
    stalls = (Stall(5, UP, 500, "miss"),)
    line = Timeline("measured", (*kernels, *moves), (), stalls, 100, 10_000)
    tensors = (
        Tensor(UP, "weight", 8, True, (1, 5), (8,)),
        Tensor(f"{UP}.exp_avg", "state", 4, True, (8,), (8,)),
        Tensor(MOMENT, "state", 4, True, (8,), (8,)),
        Tensor(f"{UP}.grad", "grad", 8, False, (8,), (7,)),
        Tensor("layers.17.mlp.up_proj.weight.exp_avg_sq", "state", 4, True, (8,), (8,)),
        Tensor("0.mul_2", "activation", 8, False, (6,), (1,)),
    )
    profile = Profile("toy", 10_000, tuple(Kernel(f"k{i}", 0, 1_000) for i in range(10)), tensors)
    return content.Sources(line, "t", profile)


@pytest.mark.parametrize(
    ("question", "first"),
    [
        ("Where is layers.7.mlp.up_proj’s second moment, when, and why?", MOMENT),
        ("layers.7.mlp.up_proj's second moment", MOMENT),
        ("layers.7 up_proj first moment", f"{UP}.exp_avg"),
        ("the gradient of layers.7.mlp.up_proj", f"{UP}.grad"),
        ("layers.7.mlp.up_proj", UP),
        ("MUL_2", "0.mul_2"),
    ],
)
def test_question_finds_the_intended_tensor(question: str, first: str) -> None:
    assert ask(sources(), f"lookUp({json.dumps(question)}, 9).map((name) => names[name])")[0] == first


def test_question_without_a_match_finds_nothing() -> None:
    assert ask(sources(), '[lookUp("no such thing", 9), lookUp("where is it", 9), lookUp("", 9)]')[::2] == [
        [],
        [],
    ]


def answer_about(name: str) -> tuple[list[str], list[tuple[int, str, str]], list[tuple[int, int, str]]]:
    at = f"names.indexOf({json.dumps(name)})"
    sentences, story, places = ask(sources(), f"[sentencesOf({at}), storyOf({at}), placesOf({at})]")
    return (
        sentences,
        [(row["at"], row["what"], row["why"]) for row in story],
        [(place["from"], place["to"], place["where"]) for place in places],
    )


def test_answer_lists_places_times_and_reasons() -> None:
    sentences, story, places = answer_about(MOMENT)
    assert places == [
        (0, 6_000, "evicted"),
        (6_000, 7_000, "moving"),
        (7_000, 9_000, "device"),
        (9_000, 9_500, "moving"),
        (9_500, 10_000, "evicted"),
    ]
    assert sentences == [
        "An optimizer state of 4 B.",
        "It is evicted when the step begins, and evicted for 65.0 % of its life in this step.",
        "It moves 2 times; compute never waits for it.",
    ]
    assert story == [
        (6_000, "is fetched from the SSD, 4 B in 1 µs", "needed by k8 (tick 8)"),
        (8_000, "k8 (tick 8) reads and writes it", ""),
        (
            9_000,
            "is evicted to the SSD, 4 B in 500 ns",
            "not needed until k8 (tick 8) of the next step, 9 µs later: other tensors use its memory "
            "meanwhile",
        ),
    ]


def test_a_tensor_that_lives_around_the_end_has_no_place_between_death_and_birth() -> None:
    kernels = tuple(Span("compute", f"k{tick}", tick * 1_000, tick * 1_000 + 1_000) for tick in range(10))
    grad = Tensor("grad", "grad", 8, False, (2,), (5,), born=5)
    profile = Profile("toy", 10_000, tuple(Kernel(f"k{i}", 0, 1_000) for i in range(10)), (grad,))
    moves = (
        Span("fetch:ssd", "grad", 1_000, 2_000, 8, "grad"),
        Span("evict:ssd", "grad", 7_000, 8_000, 8, "grad"),
    )
    line = Timeline("measured", (*kernels, *moves), (), (), 100, 10_000)
    found = ask(content.Sources(line, "t", profile), '[placesOf(names.indexOf("grad"))]')[0]
    assert [(place["from"], place["to"], place["where"]) for place in found] == [
        (0, 1_000, "evicted"),
        (1_000, 2_000, "moving"),
        (2_000, 3_000, "device"),
        (5_000, 7_000, "device"),
        (7_000, 8_000, "moving"),
        (8_000, 10_000, "evicted"),
    ]


def test_answer_shows_misses_drops_and_short_lives() -> None:
    sentences, story, places = answer_about(UP)
    assert [where for _, _, where in places] == ["device", "evicted", "moving", "device"]
    assert sentences[-1] == "It moves 1 time; compute waits 500 ns for it."
    assert story[1][:2] == (3_000, "is dropped: an equal copy exists")
    assert any(what == "compute waits 500 ns for it" and why == "miss" for _, what, why in story)
    assert any(why.endswith("; no plan asked for this fetch") for _, _, why in story)
    _, _, places = answer_about("0.mul_2")
    assert places[0][0] == 1_000 and places[-1][1] == 7_000


def test_drops_of_a_predicted_step_come_from_its_plan() -> None:
    kernels = tuple(Span("compute", f"k{tick}", tick * 1_000, tick * 1_000 + 1_000) for tick in range(10))
    moves = (Evict("a", "ssd", 4), Fetch("a", "ssd", 6, 9))
    line = Timeline("predicted", (*kernels, Span("fetch:ssd", "a", 6_000, 8_000, 4, "a")))
    given = content.Sources(line, "t", toys.diamond(), Plan("", "hand", 8, (), moves))
    assert ask(given, 'placesOf(names.indexOf("a")).map((place) => place.where)') == [
        "device",
        "evicted",
        "moving",
        "device",
    ]
