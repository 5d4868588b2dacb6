"""Two panels on memory: bytes over time on the fullest rank, and the peak of every rank by part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from autopar.documents.plan import Plan
from autopar.documents.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIXED_COLOURS = (
    "#0072B2", "#56B4E9", "#009E73", "#F0E442", "#CC79A7", "#999999", "#882255", "#44AA99", "#BBBBBB", "#332288",
)  # fmt: skip
ACTIVATIONS_COLOUR, CAPACITY_COLOUR = "#E69F00", "#D55E00"
GB = 1e9


def draw_memory(axes: Axes, plan: Plan, timeline: Timeline, step: float) -> None:
    """Bytes by part over time on the rank with the least room left, with its peak and its capacity."""
    rank = _fullest(plan, timeline)
    chosen = np.flatnonzero(np.array(timeline.memory.rank) == rank)
    time = np.array(timeline.memory.time)[chosen] * 1e3
    parts = {name: np.array(values)[chosen] / GB for name, values in timeline.memory.parts.items()}
    colours = _colours(timeline)
    names = [name for name in colours if parts[name].any()]
    floor = np.zeros(len(time))
    for name in names:
        top = floor + parts[name]
        axes.fill_between(time, floor, top, step="post", color=colours[name], lw=0, label=name)
        floor = top
    _capacity_line(axes, plan.predicted.capacity_bytes[rank], float(floor.max(initial=0.0)))
    if len(floor):
        _mark_peak(
            axes, float(time[floor.argmax()]), float(floor.max()), step, plan.predicted.capacity_bytes[rank] / GB
        )
    axes.set_xlim(0, step)
    axes.set_title(f"memory of rank {rank}, the fullest", fontsize=9, loc="left")
    axes.set_ylabel("GB", fontsize=9)
    axes.set_xlabel("milliseconds", fontsize=9)
    axes.tick_params(labelsize=8, length=2)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.2, handlelength=1.0, labelspacing=0.3,
    )  # fmt: skip


def _fullest(plan: Plan, timeline: Timeline) -> int:
    room = [capacity - peak for capacity, peak in zip(plan.predicted.capacity_bytes, timeline.peak_bytes, strict=True)]
    return room.index(min(room))


def _colours(timeline: Timeline) -> dict[str, str]:
    """Part -> colour, in stacking order: what is fixed below, activations above, the allocator's reserve on top."""
    last = ("activations", "reserve")
    fixed = [name for name, values in timeline.memory.parts.items() if name not in last and any(values)]
    colours = {name: FIXED_COLOURS[i % len(FIXED_COLOURS)] for i, name in enumerate(fixed)}
    return {**colours, "activations": ACTIVATIONS_COLOUR, "reserve": "#D9D9D9"}


def _capacity_line(axes: Axes, capacity_bytes: float, highest: float) -> None:
    capacity = capacity_bytes / GB
    if capacity > 0:
        axes.axhline(capacity, color=CAPACITY_COLOUR, ls="--", lw=1.2, label=f"capacity {capacity:.4g} GB")
    axes.set_ylim(0, max(capacity, highest) * 1.12 or 1.0)


def _mark_peak(axes: Axes, time: float, peak: float, step: float, capacity: float) -> None:
    """A dot and its figure, kept off the capacity line."""
    right, below = time < step * 0.7, 0.85 * capacity < peak <= capacity
    axes.annotate(
        f"peak {peak:.4g} GB at {milliseconds(time)}", (time, peak), textcoords="offset points", fontsize=8,
        xytext=(8 if right else -8, -5 if below else 4), ha="left" if right else "right",
        va="top" if below else "bottom",
    )  # fmt: skip
    axes.plot([time], [peak], marker="o", ms=3.5, color="black", clip_on=False)


def milliseconds(time: float) -> str:
    """Four digits, or all of them where there are more."""
    return f"{time:,.0f} ms" if time >= 1000 else f"{time:.4g} ms"


def draw_peaks(axes: Axes, plan: Plan, timeline: Timeline) -> None:
    """The peak of every rank, split into its parts at that moment, with capacities as marks."""
    ranks = np.array(timeline.memory.rank)
    values = np.array([timeline.memory.parts[name] for name in timeline.memory.parts]).reshape(-1, len(ranks))
    names, total, colours = list(timeline.memory.parts), values.sum(axis=0), _colours(timeline)
    for rank in range(plan.mesh.pp):
        chosen = np.flatnonzero(ranks == rank)
        if not len(chosen):
            continue
        moment, floor = chosen[total[chosen].argmax()], 0.0
        for name, colour in colours.items():
            bytes_ = values[names.index(name), moment] / GB
            axes.bar(rank, bytes_, bottom=floor, color=colour, width=0.8 if plan.mesh.pp <= 16 else 1.0, lw=0)
            floor += bytes_
    for rank, capacity in enumerate(plan.predicted.capacity_bytes):
        if capacity > 0:
            axes.plot([rank - 0.45, rank + 0.45], [capacity / GB] * 2, color=CAPACITY_COLOUR, ls="-", lw=1.2)
    axes.set_title("peak by rank", fontsize=9, loc="left")
    axes.set_xticks(range(0, plan.mesh.pp, max(1, -(-plan.mesh.pp // 8))))
    axes.set_xlabel("pipeline rank", fontsize=9)
    axes.set_xlim(-0.6, max(plan.mesh.pp, 4) - 0.4)
    axes.set_ylim(0, max((*plan.predicted.capacity_bytes, *timeline.peak_bytes)) / GB * 1.12 or 1.0)
    axes.tick_params(labelsize=8, length=2)
    axes.spines[["top", "right"]].set_visible(False)
