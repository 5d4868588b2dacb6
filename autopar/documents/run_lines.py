"""What a run wrote: JSON lines, the first about the run, then one for each step.

    {plan_hash, world, mesh {axis: degree} as built, torch, hosts, ...}
    {step, loss, grad_norm, seconds, seconds_by_part, tokens_per_second, peak_bytes [per rank]}

A file may hold several runs, one after the other, of a training that was resumed; the last header speaks for all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from autopar.errors import DocumentError

WARM_UP = 2
"""Steps at the start that allocate, connect and learn shapes."""
STEP_FIELDS = ("step", "loss", "seconds", "peak_bytes")


@dataclass(frozen=True)
class RunLines:
    """The lines of a run, in order."""

    header: dict[str, Any]
    steps: tuple[dict[str, Any], ...]

    @classmethod
    def load(cls, path: str | Path) -> RunLines:
        """Raises DocumentError where the file is missing, cut off, or no run's."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise DocumentError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
        lines = []
        for number, line in enumerate(text.splitlines(), 1):
            try:
                lines.append(json.loads(line))
            except ValueError:
                raise DocumentError(f"{path}: line {number} is not complete JSON; was the run ended there?") from None
        return cls.of(lines, str(path))

    @classmethod
    def of(cls, lines: Iterable[Any], name: str = "run") -> RunLines:
        """From the lines themselves. Raises DocumentError where they are no run's."""
        header: dict[str, Any] | None = None
        steps: list[dict[str, Any]] = []
        for number, line in enumerate(lines, 1):
            if isinstance(line, dict) and {"plan_hash", "world", "mesh"} <= line.keys():
                header = line
            elif header is None or not isinstance(line, dict) or not _is_step(line):
                expected = "the run's header (plan_hash, world, mesh)" if header is None else f"a step ({STEP_FIELDS})"
                raise DocumentError(f"{name}: line {number} is not {expected}; give the file that run --metrics wrote")
            else:
                steps.append(line)
        if header is None:
            raise DocumentError(f"{name}: is empty; give the file that run --metrics wrote")
        return cls(header, tuple(steps))

    @property
    def settled(self) -> tuple[dict[str, Any], ...]:
        """The steps after the warm-up; all of them where there are no more."""
        return self.steps[WARM_UP:] or self.steps

    @property
    def step_seconds(self) -> float:
        """The median step. Raises DocumentError where no step ended."""
        if not self.steps:
            raise DocumentError("the run has no steps yet: nothing to compare")
        return median(float(line["seconds"]) for line in self.settled)

    def median_of_part(self, part: str) -> float | None:
        """Median seconds of a part of the step; None where the run did not time it."""
        known = [
            float(line["seconds_by_part"][part]) for line in self.settled if part in line.get("seconds_by_part", {})
        ]
        return median(known) if known else None

    @property
    def peak_bytes(self) -> list[int]:
        """The most each rank held."""
        return [max(column) for column in zip(*(line["peak_bytes"] for line in self.steps), strict=True)]


def _is_step(line: dict[str, Any]) -> bool:
    return all(name in line for name in STEP_FIELDS) and isinstance(line["seconds"], int | float)
