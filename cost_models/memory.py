"""Bytes on a device that do not follow the micro-batches: states, communicators, context, allocator.

Per parameter, with W bytes of a compute element, M of a master element, R of a gradient element in the reduce dtype,
S of optimizer states and N shards, `STORAGE` lists what each executor holds whole, divided by N, and for one unit at
a time:

    Megatron DDP (bf16)         W + M + R + S = 2 + 4 + 4 + 8 = 18
    Megatron distributed opt.   W + R + (M + S)/N = 6 + 12/N
    ZeRO paper 0, 1, 2, 3       16,  4 + 12/N,  2 + 14/N,  16/N            (arXiv 1910.02054, gradients in W)
    FSDP2, zero 3               (M + R + S)/N + gathered W of two units + one gathered gradient

fp32 and fp64 compute in their master dtype: there is no separate copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cost_models.compute import element_bytes
from cost_models.executors import executor as executor_of
from cost_models.in_flight import activation_peak as activation_peak
from cost_models.in_flight import in_flight as in_flight
from cost_models.tables import Array, plain
from hardware_profiles.chip import GIB, Chip, normal_dtype
from hardware_profiles.cluster import Group
from hardware_profiles.errors import ProfileError
from hardware_profiles.schema import did_you_mean

OPTIMIZERS: dict[str, float] = {
    "adamw": 8.0,
    "adam": 8.0,
    "nadam": 8.0,
    "lamb": 8.0,
    "adagrad": 4.0,
    "rmsprop": 4.0,
    "sgd": 0.0,
    "sgd_momentum": 4.0,
    "lion": 4.0,
    "muon": 4.0,
    "adafactor": 0.02,
    "adam8bit": 2.0,
    "adamw8bit": 2.0,
}
"""Optimizer -> bytes of its states per parameter, in fp32 (8-bit ones excepted). Adafactor keeps a row and a column per
matrix: next to nothing."""
EIGHT_BIT = {"adam8bit", "adamw8bit"}
RESERVE_FRACTION = 1.0 / 0.94 - 1.0
"""What the allocator holds beyond what is allocated, as a fraction of it: SimuMax measured allocated / reserved =
0.94."""


@dataclass(frozen=True)
class Cell:
    """What is held of one thing, each a sum of the letters W, M, R, S: whole, divided over shards, per gathered
    unit.
    """

    whole: str = ""
    divided: str = ""
    unit: str = ""


@dataclass(frozen=True)
class Held:
    """One thing between steps and at the step's peak."""

    rest: Cell
    peak: Cell


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one device (arrays where `state_bytes` was given arrays)."""

    parameters: Any
    gradients: Any
    states: Any
    gathered: Any
    """Copies in the compute dtype, and units in use, that are gone between steps."""

    @property
    def total(self) -> Any:
        """All four."""
        return self.parameters + self.gradients + self.states + self.gathered


def _always(whole: str = "", divided: str = "") -> Held:
    return Held(Cell(whole, divided), Cell(whole, divided))


_FSDP2 = {
    0: {
        "parameter": Held(Cell("M"), Cell("MW")),
        "gradient": Held(Cell(), Cell("R")),
        "state": _always("S"),
    },
    1: {
        "parameter": Held(Cell(divided="M"), Cell("W", "M")),
        "gradient": Held(Cell(), Cell("R")),
        "state": _always(divided="S"),
    },
    2: {
        "parameter": Held(Cell(divided="M"), Cell("W", "M")),
        "gradient": Held(Cell(), Cell(divided="R", unit="WR")),
        "state": _always(divided="S"),
    },
    3: {
        "parameter": Held(Cell(divided="M"), Cell(divided="M", unit="WW")),
        "gradient": Held(Cell(), Cell(divided="R", unit="WR")),
        "state": _always(divided="S"),
    },
}
_MEGATRON = {
    0: {"parameter": _always("W"), "gradient": _always("R"), "state": _always("MS")},
    1: {"parameter": _always("W"), "gradient": _always("R"), "state": _always(divided="MS")},
    2: {
        "parameter": _always("W"),
        "gradient": Held(Cell(divided="R"), Cell(divided="R", unit="R")),
        "state": _always(divided="MS"),
    },
    3: {
        "parameter": Held(Cell(divided="W"), Cell(divided="W", unit="WW")),
        "gradient": Held(Cell(divided="R"), Cell(divided="R", unit="R")),
        "state": _always(divided="MS"),
    },
}
_ZERO_PAPER = {
    0: {"parameter": _always("W"), "gradient": _always("W"), "state": _always("MS")},
    1: {"parameter": _always("W"), "gradient": _always("W"), "state": _always(divided="MS")},
    2: {
        "parameter": _always("W"),
        "gradient": Held(Cell(divided="W"), Cell(divided="W", unit="W")),
        "state": _always(divided="MS"),
    },
    3: {
        "parameter": Held(Cell(divided="W"), Cell(divided="W", unit="WW")),
        "gradient": Held(Cell(divided="W"), Cell(divided="W", unit="W")),
        "state": _always(divided="MS"),
    },
}
STORAGE: dict[str, dict[int, dict[str, Held]]] = {
    "autopar": _FSDP2,
    "torchtitan": _FSDP2,
    "torchtitan_async_tp": _FSDP2,
    "fsdp1": _FSDP2,
    "composer": _FSDP2,
    "megatron": _MEGATRON,
    "nemo": _MEGATRON,
    "megatron_bridge": _MEGATRON,
    "megatron_script": _MEGATRON,
    "megatron_2022": _MEGATRON,
    "deepspeed_megatron": _MEGATRON,
    "megatron_2021": _MEGATRON,
    "megatron_deepspeed": _MEGATRON,
    "internevo": _ZERO_PAPER,
    "deepspeed": _ZERO_PAPER,
    "xla": _FSDP2,
}
"""Executor -> zero value -> parameter, gradient, state -> at rest, at peak."""


def held_as(executor: str, what: str, zero: int, *, pipelined: bool, accumulating: bool) -> int:
    """The zero value as which a thing is really held.

    FSDP2 under a pipeline keeps parameters gathered after the first backward (3 is 2) and whole gradients until the
    step ends (2 and 3 are 1); so it does with zero 2 over several micro-batches, whose reduction is put off to the
    last.
    """
    if STORAGE[executor] is not _FSDP2:
        return zero
    if what == "parameter" and pipelined:
        return min(zero, 2)
    if what == "gradient" and zero >= 2 and (pipelined or (zero == 2 and accumulating)):
        return 1
    return zero


def state_bytes(
    parameters: ArrayLike,
    *,
    optimizer: str,
    dtype: str,
    zero: int,
    shards: int,
    executor: str = "autopar",
    pipelined: bool = False,
    accumulating: bool = False,
    largest_unit: ArrayLike = 0.0,
    frozen: ArrayLike = 0.0,
    at_peak: bool = True,
) -> StateBytes:
    """Bytes of parameters, gradients, states and gathered units on one device.

    Args:
        parameters: trainable elements of this rank, after tp, ep and pp and before ZeRO.
        optimizer: a name of `OPTIMIZERS`.
        dtype: the compute dtype (fp8 computes from bf16 weights).
        zero: 0-3.
        shards: devices that divide states; ignored at zero 0.
        executor: whose habits (`STORAGE`).
        pipelined: the stage runs under a pipeline schedule.
        accumulating: several micro-batches per step.
        largest_unit: elements of the largest unit gathered at once (a block, or embedding or head).
        frozen: elements that are not trained: stored like parameters, without gradient, state and master copy.
        at_peak: in the middle of a backward; else between steps.

    Raises:
        ProfileError: an unknown optimizer.

    """
    widths = _widths(optimizer, dtype) | {"R": executor_of(executor).gradient_bytes(dtype)}
    n = float(shards if zero > 0 else 1)
    trained, unit = np.asarray(parameters, dtype=np.float64), np.asarray(largest_unit, dtype=np.float64)
    mode = {"pipelined": pipelined, "accumulating": accumulating}
    cells = {what: held_as(executor, what, zero, **mode) for what in ("parameter", "gradient", "state")}
    held = {what: STORAGE[executor][value][what] for what, value in cells.items()}
    now = {what: item.peak if at_peak else item.rest for what, item in held.items()}

    def own(cell: Cell) -> Array:
        return np.asarray(trained * (_sum(widths, cell.whole) + _sum(widths, cell.divided) / n), dtype=np.float64)

    copies = _sum(widths, now["parameter"].whole) - _sum(widths, held["parameter"].rest.whole)
    copies = 0.0 if zero == 0 and widths["W"] == widths["M"] else copies
    units = sum(_sum(widths, cell.unit) for cell in now.values())
    frozen_shards = n if cells["parameter"] == 3 else 1.0
    return StateBytes(
        parameters=plain(own(held["parameter"].rest) + np.asarray(frozen) * widths["W"] / frozen_shards),
        gradients=plain(own(now["gradient"])),
        states=plain(own(now["state"])),
        gathered=plain(trained * copies + unit * units),
    )


def optimizer_traffic_bytes(parameters: float, optimizer: str, dtype: str) -> float:
    """Bytes that one update of `parameters` elements moves: gradient read, states and master read and written.

    The compute copy is written too, where there is one.
    """
    widths = _widths(optimizer, dtype)
    copy = widths["W"] if widths["W"] != widths["M"] else 0.0
    return parameters * (widths["R"] + 2 * (widths["M"] + widths["S"]) + copy)


def communicator_bytes(chip: Chip, groups: Iterable[Group] | int, *, all_to_all: bool = False) -> float:
    """Buffers of the process groups that a device joins (groups of one have none).

    Measured on A100: 1.45-1.5 GiB for the first communicator, 544-688 MB for each further one; the first all-to-all on
    8 H100 took 3.3 GB more (NVIDIA/nccl issues 964, 864, 1685).
    """
    count = groups if isinstance(groups, int) else sum(1 for group in groups if group.size > 1)
    if count == 0:
        return 0.0
    sizes = chip.communicator_gib
    return GIB * (sizes.first + sizes.each * (count - 1) + (sizes.all_to_all if all_to_all else 0.0))


def context_bytes(chip: Chip) -> float:
    """What the runtime takes on the device before the first tensor."""
    return chip.context_gib * GIB


def _widths(optimizer: str, dtype: str) -> dict[str, float]:
    if optimizer not in OPTIMIZERS:
        raise ProfileError(
            f"unknown optimizer '{optimizer}'{did_you_mean(optimizer, OPTIMIZERS)}; known: {', '.join(OPTIMIZERS)}"
        )
    master = 8.0 if normal_dtype(dtype) == "fp64" else 4.0
    states = OPTIMIZERS[optimizer] * (1.0 if optimizer in EIGHT_BIT else master / 4.0)
    return {"W": max(element_bytes(dtype), 2.0), "M": master, "R": master, "S": states}


def _sum(widths: dict[str, float], letters: str) -> float:
    return sum(widths[letter] for letter in letters)
