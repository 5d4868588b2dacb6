"""What options may hold, and a parser whose errors say what was probably meant."""

from __future__ import annotations

import argparse
import math
import sys
from contextlib import AbstractContextManager, redirect_stdout
from typing import NoReturn

from autopar.errors import RequestError
from hardware_profiles.schema import did_you_mean

MODEL_HELP = (
    "model.py, model.py:factory, package.module:factory, a Hugging Face config.json or its folder, or graph.json"
)
MOST = 10**9
"""Of sequences, tokens of one, devices: far above what anyone trains, and what a search can still count."""
DTYPES = ("bf16", "fp16", "fp32", "fp64", "fp8")
KERNELS = ("eager", "compiled", "fused")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors say what was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Raise RequestError with the nearest known word."""
        if "invalid choice" in message:
            given = message.partition("invalid choice: ")[2].partition(" (")[0].strip("'")
            action = next((item for item in self._actions if item.choices and given not in item.choices), None)
            message += (
                did_you_mean(given, [str(choice) for choice in action.choices]) if action and action.choices else ""
            )
        raise RequestError(f"{message}\n{self.format_usage().strip()}")


def own_output_only() -> AbstractContextManager[object]:
    """What the user's model prints goes to stderr: stdout holds the answer and nothing else."""
    return redirect_stdout(sys.stderr)


def positive(text: str) -> int:
    """A whole number above 0."""
    try:
        value = int(text.replace("_", "").replace(",", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
    if value > MOST:
        raise argparse.ArgumentTypeError(f"{text[:40]} is given, but at most {MOST:,} is planned for")
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is given, but at least 1 is needed")
    return value


def positive_number(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is given, but a number above 0 is needed")
    return value


def fraction(text: str) -> float:
    """A share such as 5% or 0.05."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise RequestError(f"--memory-margin {text}: give a share such as 5% or 0.05") from None
    if not 0 <= value < 1:
        raise RequestError(f"--memory-margin {text}: must lie between 0% and 100%")
    return value


def straggler(text: str | None, stages: int) -> dict[int, float] | None:
    """Pp rank -> how many times slower it computes, from ``rank=R,slow=X``."""
    if text is None:
        return None
    given = dict(item.partition("=")[::2] for item in text.split(","))
    try:
        rank, slow = int(given["rank"]), float(given["slow"])
    except (KeyError, ValueError):
        raise RequestError(f"--straggler {text}: give it as rank=3,slow=1.2") from None
    if not 0 <= rank < stages or not 0 < slow < math.inf:
        raise RequestError(
            f"--straggler {text}: the plan has pp ranks 0 to {stages - 1}, and slow must be a number above 0"
        )
    return {rank: slow}
