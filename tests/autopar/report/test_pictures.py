"""Pictures: what is drawn where, by file ending, without touching matplotlib's global state."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import numpy as np
import pytest

from autopar.errors import DocumentError, RequestError
from autopar.report.pictures import COLOURS, bars_by_colour, picture, write_picture, zoom_windows
from autopar.simulator import simulate
from tests.plans import make_plan

SHORT = make_plan(2, 3, forward=1e-3, backward=2e-3, activation=1e9, capacity=8e9, memory={"parameters": 2e9})
LONG = make_plan(4, 96, forward=1e-3, backward=2e-3, activation=1e8)


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_a_short_step_numbers_every_forward_and_backward():
    figure = picture(SHORT, simulate(SHORT))
    assert sorted(texts(figure.axes[0])) == sorted("012" * 4)


def test_a_long_step_shows_its_beginning_and_its_end_with_numbers():
    figure = picture(LONG, simulate(LONG))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[1:3] == ["the beginning", "the end"]
    assert "0" in texts(figure.axes[1])
    assert "95" in texts(figure.axes[2])


def test_bars_cover_the_step_of_a_rank_that_never_idles():
    plan = make_plan(1, 4, forward=1e-3, backward=2e-3, optimizer_seconds=1e-3)
    line = simulate(plan)
    drawn = sum(float(np.sum(bars.end - bars.start)) for bars in bars_by_colour(line).values())
    assert drawn == pytest.approx(line.step_seconds * 1e3)


def test_numbers_that_fit_need_no_enlargement():
    line = simulate(SHORT)
    assert zoom_windows(bars_by_colour(line)["forward"], line.step_seconds * 1e3, SHORT) is None


def luminance(colour):
    """Relative luminance, WCAG 2.1."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_forward_backward_and_idle_differ_without_any_colour():
    """Contrast ratio by WCAG 2.1, at least 1.9 between neighbours in lightness."""
    light = sorted((luminance(COLOURS[name]) for name in ("forward", "backward", "idle")), reverse=True)
    assert all((a + 0.05) / (b + 0.05) >= 1.9 for a, b in pairwise(light))


def test_capacity_is_drawn_and_named():
    legend = picture(SHORT, simulate(SHORT)).axes[1].get_legend()
    assert "capacity 8 GB" in [text.get_text() for text in legend.get_texts()]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_ending_decides_the_format(tmp_path, ending):
    path = tmp_path / f"pipeline.{ending}"
    write_picture(SHORT, simulate(SHORT), path)
    if ending == "png":
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    else:
        assert ElementTree.fromstring(path.read_text()).tag == "{http://www.w3.org/2000/svg}svg"


def test_the_same_plan_gives_the_same_svg(tmp_path):
    for name in ("a.svg", "b.svg"):
        write_picture(SHORT, simulate(SHORT), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"ends in \.png or \.svg, not in \.jpeg"):
        write_picture(SHORT, simulate(SHORT), tmp_path / "pipeline.jpeg")


def test_a_place_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DocumentError, match="cannot be written"):
        write_picture(SHORT, simulate(SHORT), tmp_path / "nowhere" / "pipeline.png")


def test_drawing_does_not_bring_pyplot_in():
    before = "matplotlib.pyplot" in sys.modules
    picture(SHORT, simulate(SHORT))
    assert ("matplotlib.pyplot" in sys.modules) == before
