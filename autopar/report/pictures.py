"""The pipeline as a picture: what every rank does when, and what its memory holds.

    top      a row per pipeline rank: the compute stream, and communication where nothing hides it
    middle   long steps only: the beginning and the end, large enough to read micro-batch numbers
    bottom   bytes over time on the fullest rank, by part; the peak of every rank beside it

Colours are those of Okabe and Ito (2008), told apart with any kind of colour vision; forward and backward also differ
in lightness, so that a grey print stays readable.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from autopar.documents.base import write_atomically
from autopar.documents.plan import Plan
from autopar.documents.timeline import Timeline
from autopar.errors import RequestError
from autopar.report.memory_panels import draw_memory, draw_peaks, milliseconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

COLOURS = {
    "forward": "#56B4E9", "backward": "#0072B2", "recompute": "#CC79A7", "communication": "#D55E00",
    "optimizer": "#009E73", "overhead": "#555555", "idle": "#EDEDED",
}  # fmt: skip
"""What is drawn, in drawing order after the idle ground: communication first, so that only its bare part shows."""
DRAWN = ("communication", "overhead", "recompute", "forward", "backward", "optimizer")
NUMBER_COLOURS = {"forward": "black", "backward": "white"}
WIDTH_INCHES, DPI = 13.0, 110
MANY = 3000
"""From here on bars of one colour become pixels in an SVG, too."""
NUMBER_POINTS = 7.0
"""Size of a micro-batch number, in points."""
MOST_NUMBERED_ROWS = 24
"""More ranks than this leave no height for numbers."""


@dataclass(frozen=True, slots=True)
class Bars:
    """Spans of one colour: row, start and end in milliseconds, micro-batch (-1: none)."""

    row: npt.NDArray[np.int64]
    start: Floats
    end: Floats
    micro_batch: npt.NDArray[np.int64]


def picture_format(path: str | Path) -> str:
    """``png`` or ``svg``, by a file's ending. Raises RequestError."""
    ending = Path(path).suffix.lower().lstrip(".")
    if ending not in ("png", "svg"):
        raise RequestError(f"{path}: a picture ends in .png or .svg, not in {('.' + ending) if ending else 'nothing'}")
    return ending


def write_picture(plan: Plan, timeline: Timeline, path: str | Path) -> None:
    """Draw pipeline and memory to `path`, as PNG or SVG by its ending.

    Raises RequestError for another ending, DocumentError if the place cannot be written.
    """
    ending = picture_format(path)
    drawn = picture(plan, timeline)
    buffer = io.BytesIO()
    # A fixed salt and no date: the same plan gives the same file.
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": timeline.plan_hash}):
        drawn.savefig(buffer, format=ending, dpi=DPI, metadata={"Date": None} if ending == "svg" else None)
    write_atomically(path, buffer.getvalue())


def picture(plan: Plan, timeline: Timeline) -> Figure:
    """The figure; nothing of matplotlib's global state is touched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars, step = bars_by_colour(timeline), timeline.step_seconds * 1e3
    windows = zoom_windows(bars["forward"], step, plan)
    rows = plan.mesh.pp
    pipeline_inches = min(6.0, max(1.1, 0.27 * rows))
    heights = [pipeline_inches] * (2 if windows else 1) + [2.3]
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights) + 0.62 * len(heights) + 0.75), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(plan, timeline), fontsize=11, x=0.01, ha="left")
    bands: Any = figure.subfigures(len(heights), 1, height_ratios=[height + 0.62 for height in heights])
    whole = bands[0].subplots()
    _legend(whole, draw_pipeline(whole, bars, rows, (0.0, step)))
    if windows:
        for axes, window, name in zip(bands[1].subplots(1, 2), windows, ("the beginning", "the end"), strict=True):
            draw_pipeline(axes, bars, rows, window, side_by_side=2)
            axes.set_title(name, fontsize=9, loc="left")
    curve, peaks = bands[-1].subplots(1, 2, width_ratios=[3, 1])
    draw_memory(curve, plan, timeline, step)
    draw_peaks(peaks, plan, timeline)
    return figure


def _title(plan: Plan, timeline: Timeline) -> str:
    schedule, share = plan.schedule, timeline.seconds_by_part["bubble"] / timeline.step_seconds
    chunks = f" with {schedule.virtual_stages} chunks per rank" if schedule.virtual_stages > 1 else ""
    batches = f"{schedule.micro_batches} micro-batch{'es' if schedule.micro_batches > 1 else ''}"
    return (
        f"{plan.model.spec} on {plan.cluster.name}: {schedule.name}{chunks}, {batches}; "
        f"step {milliseconds(timeline.step_seconds * 1e3)}, bubble {share:.1%}"
    )


def bars_by_colour(timeline: Timeline) -> dict[str, Bars]:
    """Spans sorted into the colours they are drawn in; sends are left out, they hold no rank up by themselves."""
    spans = timeline.spans
    colours = np.array(
        [
            kind if stream == "compute" else "communication" if stream in ("collective", "dp") else ""
            for stream, kind in zip(spans.stream, spans.kind, strict=True)
        ],
        dtype=object,
    )
    rank, micro_batch = np.array(spans.rank, dtype=np.int64), np.array(spans.micro_batch, dtype=np.int64)
    start, seconds = np.array(spans.start), np.array(spans.seconds)
    bars = {}
    for colour in DRAWN:
        chosen = np.flatnonzero(colours == colour)
        end = start[chosen] + seconds[chosen]
        bars[colour] = Bars(rank[chosen], start[chosen] * 1e3, end * 1e3, micro_batch[chosen])
    return bars


def zoom_windows(forwards: Bars, step: float, plan: Plan) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """The first and last stretch of the step in which forwards have room for their numbers; None where all have."""
    if not len(forwards.start):
        return None
    forward = float(np.median(forwards.end - forwards.start))
    needed = _pixels_of_number(plan.schedule.micro_batches - 1) if plan.mesh.pp <= MOST_NUMBERED_ROWS else 5.0
    if forward >= needed * step / _axes_pixels(1):
        return None
    stretch = min(step, max(forward * _axes_pixels(2) / needed, step * 0.02))
    return (0.0, stretch), (step - stretch, step)


def _axes_pixels(side_by_side: int) -> float:
    """About how many pixels wide the axes are, one or two in a row."""
    return WIDTH_INCHES * DPI * (0.92 if side_by_side == 1 else 0.44)


def _pixels_of_number(number: int) -> float:
    return NUMBER_POINTS * DPI / 72 * (0.62 * len(str(number)) + 0.4)


def draw_pipeline(
    axes: Axes, bars: dict[str, Bars], rows: int, window: tuple[float, float], *, side_by_side: int = 1
) -> list[str]:
    """A row per rank between two moments (milliseconds), with numbers where they fit; returns the colours used."""
    from matplotlib.collections import PolyCollection

    axes.set_xlim(*window)
    axes.set_ylim(rows - 0.5, -0.5)
    for row in range(rows):
        axes.axhspan(row - 0.42, row + 0.42, color=COLOURS["idle"], lw=0, zorder=0)
    pixels = _axes_pixels(side_by_side) / (window[1] - window[0])
    used = []
    for layer, colour in enumerate(DRAWN, start=1):
        shown = _within(bars[colour], window)
        if not len(shown.start):
            continue
        used.append(colour)
        wide = float(np.median(shown.end - shown.start)) * pixels > 4
        axes.add_collection(
            PolyCollection(
                list(_corners(shown)), facecolors=COLOURS[colour], edgecolors="white" if wide else "none",
                linewidths=0.4 if wide else 0.0, zorder=layer, rasterized=len(shown.start) > MANY,
            )
        )  # fmt: skip
        if colour in NUMBER_COLOURS and rows <= MOST_NUMBERED_ROWS:
            _number(axes, shown, window, NUMBER_COLOURS[colour], pixels)
    _dress(axes, rows)
    return used


def _legend(axes: Axes, used: list[str]) -> None:
    from matplotlib.patches import Patch

    names = [name for name in COLOURS if name in used or name == "idle"]
    axes.legend(
        handles=[Patch(color=COLOURS[name], label=_LABELS.get(name, name)) for name in names], ncols=len(names),
        loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8, borderaxespad=0.2, handlelength=1.2,
    )  # fmt: skip


_LABELS = {"communication": "communication, bare", "overhead": "host overhead"}


def _dress(axes: Axes, rows: int) -> None:
    every = max(1, -(-rows // 16))
    axes.set_yticks(range(0, rows, every))
    axes.tick_params(labelsize=8, length=2)
    axes.set_ylabel("pipeline rank", fontsize=9)
    axes.set_xlabel("milliseconds", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _within(bars: Bars, window: tuple[float, float]) -> Bars:
    inside = (bars.end > window[0]) & (bars.start < window[1])
    return Bars(bars.row[inside], bars.start[inside], bars.end[inside], bars.micro_batch[inside])


def _corners(bars: Bars) -> Floats:
    """(bars, 4 corners, xy)."""
    corners = np.empty((len(bars.start), 4, 2))
    corners[:, 0, 0] = corners[:, 1, 0] = bars.start
    corners[:, 2, 0] = corners[:, 3, 0] = bars.end
    corners[:, 0, 1] = corners[:, 3, 1] = bars.row - 0.42
    corners[:, 1, 1] = corners[:, 2, 1] = bars.row + 0.42
    return corners


def _number(axes: Axes, bars: Bars, window: tuple[float, float], colour: str, pixels: float) -> None:
    """Micro-batch numbers inside their bars; `pixels` per millisecond."""
    for row, start, end, number in zip(bars.row, bars.start, bars.end, bars.micro_batch, strict=True):
        inside = start >= window[0] and end <= window[1]
        if inside and (end - start) * pixels >= _pixels_of_number(number):
            axes.text(
                (start + end) / 2, row, str(number), ha="center", va="center_baseline", fontsize=NUMBER_POINTS,
                color=colour, zorder=len(DRAWN) + 1, clip_on=True,
            )  # fmt: skip
