"""Choose the rows that ship with the repository: of every source and chip some, the same ones each time.

    python benchmarks/choose_runs.py DIR

Facts are copied as they stand, with the citation of their row; which are taken follows from a hash of the row's name.
"""

from __future__ import annotations

import csv
import hashlib
import sys
from pathlib import Path

from runs_table import COLUMNS

OUTPUT = Path(__file__).resolve().parent / "runs"
MOST = 44
"""Rows of a file; of each chip at least a few."""
FEW = 6


def main() -> int:
    for path in sorted(Path(sys.argv[1]).glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as stream:
            rows = sorted(csv.DictReader(stream), key=lambda row: hashlib.sha256(row["id"].encode()).hexdigest())
        chosen = _chosen(rows)
        with (OUTPUT / path.name).open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, COLUMNS, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(chosen, key=lambda row: row["id"]))
    return 0


def _chosen(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    taken = rows[:MOST]
    for gpu in {row["gpu"] for row in rows}:
        have = sum(row["gpu"] == gpu for row in taken)
        taken += [row for row in rows[MOST:] if row["gpu"] == gpu][: max(0, FEW - have)]
    return taken


if __name__ == "__main__":
    sys.exit(main())
