"""A run as it goes: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 5.0


class RunProgress:
    """Called with every line of a run on rank 0."""

    def __init__(self, steps: int, unit: str = "tokens", console: Console | None = None) -> None:
        self.steps, self.unit, self.console = steps, unit, console or Console(stderr=True, highlight=False)
        self.bar: Progress | None = None
        self.said = 0.0
        self.warned = False

    def __call__(self, line: dict[str, Any]) -> None:
        """Show a header or a step."""
        if "step" not in line:
            self._open(line)
            return
        if not math.isfinite(line["loss"]) and not self.warned:
            self.warned = True
            self.console.print(f"the loss of step {line['step']} is {line['loss']}: what follows learns nothing")
        if self.bar is not None:
            about = f"loss {line['loss']:.4f}  {line['seconds'] * 1e3:,.1f} ms  {line['tokens_per_second']:,.0f} {self.unit}/s"
            self.bar.update(self.bar.task_ids[0], completed=line["step"], description=about, refresh=True)
            if line["step"] >= self.steps:
                self.bar.stop()
        elif line["step"] in (1, self.steps) or time.monotonic() - self.said > SECONDS_BETWEEN_LINES:
            self.said = time.monotonic()
            self.console.print(
                f"step {line['step']}/{self.steps}  loss {line['loss']:.4f}  {line['seconds'] * 1e3:,.1f} ms  "
                f"{line['tokens_per_second']:,.0f} {self.unit}/s"
            )

    def _open(self, header: dict[str, Any]) -> None:
        mesh = " ".join(f"{axis}={size}" for axis, size in header["mesh"].items() if size > 1) or "undivided"
        resumed = f", resumed after step {header['resumed_from']}" if header["resumed_from"] else ""
        self.console.print(
            f"{header['world']} ranks: {mesh} ({header['backend']} on {header['device']}, {len(header['hosts'])} hosts); "
            f"{header['initialised']}{resumed}"
        )
        if self.console.is_terminal:
            # Refreshed by hand: a forked rank needs no thread of its own for this.
            self.bar = Progress(
                MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn(),
                console=self.console, auto_refresh=False,
            )  # fmt: skip
            self.bar.add_task("", total=self.steps, completed=header["resumed_from"])
            self.bar.start()
