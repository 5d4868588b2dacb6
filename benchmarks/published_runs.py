"""Score the cost models on published, measured training runs.

    python benchmarks/published_runs.py --runs DIR [--json out.json] [--page docs/accuracy.md]

DIR holds CSV files (columns: `runs_table.COLUMNS`). For each row the architecture is captured, the stated plan is priced
on the stated cluster under the framework's executor, and simulated. No row, file or source has a knob of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from runs_pricing import Scored, predict
from runs_report import write_figure, write_page
from runs_scores import macro, measured_bytes, summary
from runs_table import Run, Skip, one_release_each, read_folder

PROCESSES, CHUNKS, FEW = 2, 6, 40
"""Workers, pieces of work for each, and how many rows are done without."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of CSV files")
    parser.add_argument("--json", type=Path, help="write all figures and rows here")
    parser.add_argument("--page", type=Path, help="renew the table and the figure of this Markdown page")
    parser.add_argument("--only", default="", help="score files whose name contains this")
    options = parser.parse_args()
    if not options.runs.is_dir():
        print(f"--runs {options.runs}: no such folder", file=sys.stderr)
        return 2
    report, scored = score_folder(options.runs, options.only)
    print(text_of(report))
    if options.page:
        figure = options.page.with_suffix(".png")
        write_figure(scored, figure)
        write_page(report, scored, options.page, figure)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


def score_folder(folder: Path, only: str = "") -> tuple[dict[str, Any], list[Scored]]:
    """All figures of a folder (overall, by file, by source, rows, what was skipped), and its predictions."""
    runs, unreadable = read_folder(folder)
    runs = [run for run in runs if only in run.file]
    kept = list(one_release_each(runs))
    scored, skipped = predict_all(kept)
    skipped += [(file, identity, reason) for file, identity, reason in unreadable if only in file]
    return report_of(runs, kept, scored, skipped), scored


def predict_all(runs: list[Run]) -> tuple[list[Scored], list[tuple[str, str, Skip]]]:
    """Predictions, and (file, id, why) of the rows that cannot be priced; two processes where there is much to do."""
    # Rows of like shapes share captured graphs and divisions: they stay together.
    alike = sorted(runs, key=lambda run: (run.hidden, run.heads, run.ffn, run.seq_len, run.tp))
    if len(alike) < FEW:
        outcomes = [_outcome(run) for run in alike]
    else:
        with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
            outcomes = list(pool.map(_outcome, alike, chunksize=max(1, len(alike) // (PROCESSES * CHUNKS))))
    place = {(run.file, run.id): number for number, run in enumerate(runs)}
    order = sorted(zip(alike, outcomes, strict=True), key=lambda pair: place[pair[0].file, pair[0].id])
    scored = [found for _, found in order if isinstance(found, Scored)]
    return scored, [(run.file, run.id, Skip(*found)) for run, found in order if not isinstance(found, Scored)]


def _outcome(run: Run) -> Scored | tuple[str, str]:
    """A prediction, or the kind of reason and the detail why there is none."""
    warnings.simplefilter("ignore")
    try:
        return predict(run)
    except Skip as reason:
        return reason.kind, reason.detail
    except (
        Exception
    ) as error:  # one row that cannot be priced must not end the others: it is listed with what went wrong
        return "failed", f"{type(error).__name__}: {error}"


def report_of(
    runs: list[Run], kept: list[Run], scored: list[Scored], skipped: list[tuple[str, str, Skip]]
) -> dict[str, Any]:
    """The JSON of the contract."""
    files = sorted({run.file for run in runs} | {file for file, _, _ in skipped})
    repeats = {file: sum(r.file == file for r in runs) - sum(r.file == file for r in kept) for file in files}

    def of(name: str, attribute: str) -> dict[str, Any]:
        own = [one for one in scored if getattr(one.run, attribute) == name]
        members = {run.file for run in runs if getattr(run, attribute) == name} | {name}
        why = [reason for file, _, reason in skipped if file in members]
        return summary(own, why, sum(repeats.get(file, 0) for file in members))

    by_source = {source: of(source, "source") for source in sorted({run.source for run in runs})}
    overall = summary(scored, [reason for _, _, reason in skipped], sum(repeats.values()))
    return {
        "overall": overall
        | {"macro": macro(by_source), "skipped_share": len(skipped) / max(1, len(scored) + len(skipped))},
        "stated": summary([one for one in scored if not one.searched], []),
        "searched": summary([one for one in scored if one.searched], []),
        "by_file": {file: of(file, "file") for file in files},
        "by_source": by_source,
        "rows": [_row(one) for one in scored],
        "skipped_rows": [
            {"file": file, "id": name, "reason": why.kind, "detail": why.detail} for file, name, why in skipped
        ],
    }


def _row(one: Scored) -> dict[str, Any]:
    return {
        "id": one.run.id,
        "file": one.run.file,
        "executor": one.executor,
        "searched": one.searched,
        "choice": vars(one.choice),
        "measured_seconds": one.run.seconds,
        "predicted_seconds": one.seconds,
        "low": one.low,
        "high": one.high,
        "measured_bytes": measured_bytes(one.run),
        "predicted_bytes": one.memory_bytes,
        "parts": {name: seconds for name, seconds in one.parts.items() if seconds},
        "bytes": one.breakdown,
    }


HEADINGS = (
    ("rows", "rows", "d"), ("scored", "scored", "d"), ("timed", "timed", "d"), ("median", "median_abs_error", "%"),
    ("mean", "mean_abs_error", "%"), ("p90", "p90_abs_error", "%"), ("bias", "bias", "%"), ("in 80%", "within_interval", "%"),
    ("+-", "interval_half_width", "%"), ("rank", "rank_correlation", "f"), ("regret", "regret", "%"),
    ("memory", "memory_mean_abs_error", "%"), ("mem bias", "memory_bias", "%"), ("peer", "peer_mean_abs_error", "%"),
)  # fmt: skip


def text_of(report: dict[str, Any]) -> str:
    """The table that is printed."""
    lines = [f"{'':26}" + "".join(f"{heading:>9}" for heading, _, _ in HEADINGS)]
    tables = {
        **report["by_file"],
        "all rows": report["overall"],
        "recompute stated": report["stated"],
        "searched": report["searched"],
    }
    lines += [
        f"{name:26}" + "".join(_cell(one[key], kind) for _, key, kind in HEADINGS) for name, one in tables.items()
    ]
    means = report["overall"]["macro"]
    lines.append(
        "macro-average over sources: "
        + ", ".join(f"{name} {_cell(value, '%').strip()}" for name, value in means.items())
    )
    lines.append(f"skipped: {report['overall']['skipped']} ({report['overall']['skipped_share']:.1%} of the rows)")
    return "\n".join(lines)


def _cell(value: float | None, kind: str) -> str:
    if value is None:
        return f"{'-':>9}"
    return f"{value:>9.0f}" if kind == "d" else f"{value:>9.3f}" if kind == "f" else f"{value:>9.1%}"


if __name__ == "__main__":
    sys.exit(main())
