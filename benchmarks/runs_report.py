"""docs/accuracy.md and its figure, from the figures of a scoreboard run.

    leave one source out    predictions of a source times what the other sources on its chip say that the chip's rate is off
                            (median of measured over predicted in each of them, mean over them)

A chip that one source alone ran keeps its own rate, and is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from runs_clusters import chip_of
from runs_intervals import left_out_intervals, residuals
from runs_pricing import Scored
from runs_scores import is_timed, measured_bytes

matplotlib.use("Agg")
MARKERS = "osv^D<>Pp*hXd"


def leave_one_out(scored: Sequence[Scored]) -> tuple[dict[str, float], list[str]]:
    """Source -> median error with its chips' rates from other sources; and the chips that one source alone ran."""
    timed = [one for one in scored if is_timed(one.run)]
    ratios: dict[str, dict[str, list[float]]] = {}
    for one in timed:
        by_source = ratios.setdefault(chip_of(one.run).name, {})
        by_source.setdefault(one.run.source, []).append((one.run.seconds or 1.0) / one.seconds)
    errors: dict[str, list[float]] = {}
    for one in timed:
        others = [
            float(np.median(values))
            for source, values in ratios[chip_of(one.run).name].items()
            if source != one.run.source
        ]
        factor = float(np.mean(others)) if others else 1.0
        errors.setdefault(one.run.source, []).append(abs(one.seconds * factor / (one.run.seconds or 1.0) - 1))
    alone = sorted(chip for chip, by_source in ratios.items() if len(by_source) == 1)
    return {source: float(np.median(values)) for source, values in errors.items()}, alone


def write_figure(scored: Sequence[Scored], path: Path) -> None:
    """Predicted against measured seconds, both logarithmic, by source; the band is 10 %."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 6))
    timed = [one for one in scored if is_timed(one.run)]
    for number, source in enumerate(sorted({one.run.source for one in timed})):
        own = [one for one in timed if one.run.source == source]
        measured, predicted = [one.run.seconds or 0.0 for one in own], [one.seconds for one in own]
        marker = MARKERS[number % len(MARKERS)]
        axes.scatter(measured, predicted, s=14, marker=marker, alpha=0.6, label=source, linewidths=0.3)
    ends = np.array([min(one.run.seconds or 1.0 for one in timed), max(one.run.seconds or 1.0 for one in timed)])
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(ends, ends / 1.1, ends * 1.1, color="black", alpha=0.1, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="measured, seconds per step", ylabel="predicted, seconds per step")
    axes.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def write_page(report: dict[str, Any], scored: Sequence[Scored], page: Path, figure: Path) -> None:
    """The part of the page between its two marks is replaced; what stands around it is kept."""
    begin, end = "<!-- scoreboard -->", "<!-- end of scoreboard -->"
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    body = "\n".join([_table(report, scored), "", f"![predicted against measured]({figure.name})", "", _chips(scored)])
    page.write_text(f"{before}{begin}\n{body}\n{end}{after}", encoding="utf-8")


def _table(report: dict[str, Any], scored: Sequence[Scored]) -> str:
    left_out, alone = leave_one_out(scored)
    lines = [
        "| source | rows | priced | median | leave one out | mean | p90 | bias | in 80 % | ± | rank | regret | peer |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for source, one in report["by_source"].items():
        if one["timed"]:
            lines.append(_line(source, one, left_out[source]))
    for name in ("stated", "searched"):
        if report[name]["timed"]:
            lines.append(_line(f"recompute and interleave {name}", report[name], None))
    overall = report["overall"]
    lines.append(_line("all rows", overall, None))
    means = overall["macro"]
    return "\n".join(
        [
            *lines,
            "",
            f"Macro-average over sources: median {means['median_abs_error']:.1%} (leave one out "
            f"{np.mean(list(left_out.values())):.1%}), p90 {means['p90_abs_error']:.1%}, rank correlation "
            f"{means['rank_correlation']:.2f}, regret {means['regret']:.1%}. Skipped {overall['skipped_share']:.1%}: "
            + (", ".join(f"{kind} {count}" for kind, count in overall["skipped"].items()) or "none")
            + f". Chips that one source alone ran: {', '.join(alone)}.",
            "",
            _intervals(scored),
            "",
            _memory(report),
        ]
    )


def _line(name: str, one: dict[str, Any], left_out: float | None) -> str:
    cells = [
        name,
        str(one["rows"]),
        str(one["scored"]),
        _percent(one["median_abs_error"]),
        _percent(left_out),
        *(_percent(one[key]) for key in ("mean_abs_error", "p90_abs_error", "bias", "within_interval")),
        _percent(one["interval_half_width"]),
        "-" if one["rank_correlation"] is None else f"{one['rank_correlation']:.2f}",
        _percent(one["regret"]),
        _percent(one["peer_mean_abs_error"]),
    ]
    return "| " + " | ".join(cells) + " |"


def _intervals(scored: Sequence[Scored]) -> str:
    inside, width = left_out_intervals(scored)
    fitted = ", ".join(f"{name} {value:.2f}" for name, value in residuals(scored).items())
    return (
        f"Intervals with residuals from the other sources: {inside:.1%} of the rows inside, median half-width {width:.1%}. "
        f"Residuals from all of these rows: {fitted}."
    )


def _memory(report: dict[str, Any]) -> str:
    lines = ["| peak memory | mean error | bias | largest | peer |", "|---|--:|--:|--:|--:|"]
    for source, one in report["by_source"].items():
        if one["memory_mean_abs_error"] is not None:
            keys = ("memory_mean_abs_error", "memory_bias", "memory_max_abs_error", "peer_memory_mean_abs_error")
            lines.append("| " + " | ".join([source, *(_percent(one[key]) for key in keys)]) + " |")
    return "\n".join(lines)


def _chips(scored: Sequence[Scored]) -> str:
    lines = ["| chip | rows | median | bias |", "|---|--:|--:|--:|"]
    errors: dict[str, list[float]] = {}
    for one in scored:
        if is_timed(one.run):
            errors.setdefault(chip_of(one.run).name, []).append(one.seconds / (one.run.seconds or 1.0) - 1)
    for chip, values in sorted(errors.items()):
        lines.append(f"| {chip} | {len(values)} | {np.median(np.abs(values)):.1%} | {np.mean(values):+.1%} |")
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def memory_rows(scored: Sequence[Scored]) -> list[tuple[str, float, float]]:
    """(id, measured, predicted) bytes of the rows that state a peak."""
    found = ((one.run.id, measured_bytes(one.run), one.memory_bytes) for one in scored)
    return [(name, measured, predicted) for name, measured, predicted in found if measured is not None]
