"""Bytes that a device holds: parameters, gradients, optimizer states, communicators, context; micro-batches in flight.

Per parameter, bf16 with fp32 master states over N shards (ZeRO: Rajbhandari et al., arXiv 1910.02054):

    zero 0    2 + 4 + 12            parameter, gradient (fp32), master and two moments of AdamW
    zero 1    2 + 4 + 12/N          gradients stay whole until the step's end
    zero 2    2 + 4/N + 12/N        gradients reduced after each backward
    zero 3    (2 + 4 + 12)/N        plus the gathered units in use

fp32 and fp64 training have no separate master copy. Under a pipeline gradients stay whole until the step ends, and zero 3
keeps its parameters gathered from the first use: FSDP2 then holds what zero 1 would.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.compute import element_bytes
from hardware_profiles.chip import GIB, Chip, normal_dtype


@dataclass(frozen=True)
class OptimizerCost:
    """State elements per parameter, bytes of each, and passes over memory per update."""

    states: float
    state_bytes: float | None = 4.0
    """None: as wide as the master parameter."""
    master: bool = True
    """Whether low-precision training keeps an fp32 copy of the parameters."""


OPTIMIZERS = {
    "adamw": OptimizerCost(2),
    "adam": OptimizerCost(2),
    "sgd": OptimizerCost(0),
    "sgd_momentum": OptimizerCost(1),
    "lion": OptimizerCost(1),
    "adafactor": OptimizerCost(0.01),  # one row and one column per matrix (Shazeer and Stern, arXiv 1804.04235)
    "lamb": OptimizerCost(2),
    "lars": OptimizerCost(1),
    "adam8bit": OptimizerCost(2, 1.0),  # Dettmers et al., arXiv 2110.02861
    "muon": OptimizerCost(1),
}

RESERVE_FRACTION = 1 / 0.94 - 1
"""Reserved over allocated bytes of the caching allocator, less one (SimuMax's figure, simumax/core/config.py)."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes at rest on one device."""

    parameters: float
    gradients: float
    states: float

    @property
    def total(self) -> float:
        """All three."""
        return self.parameters + self.gradients + self.states


def state_bytes(
    parameters: float, *, optimizer: str, dtype: str, zero: int, shards: int, accumulates_whole: bool = False
) -> StateBytes:
    """Parameters, gradients and optimizer states of `parameters` elements (after tp) over `shards` dp ranks.

    `accumulates_whole`: gradients stay whole until the step's end and gathered parameters are kept (pipelines).
    """
    cost = OPTIMIZERS[optimizer]
    width = element_bytes(dtype)
    narrow = normal_dtype(dtype) not in ("fp32", "fp64")
    gradient_width = max(width, 4.0)
    master = 4.0 if narrow and cost.master else 0.0
    state = master + cost.states * (cost.state_bytes if narrow or cost.state_bytes == 1.0 else width)  # type: ignore[operator]
    shard = 1.0 / shards
    return StateBytes(
        parameters=parameters * width * (shard if zero == 3 else 1.0),
        gradients=parameters * gradient_width * (shard if zero >= 2 and not accumulates_whole else 1.0),
        states=parameters * state * (shard if zero >= 1 else 1.0),
    )


def optimizer_traffic_bytes(parameters: float, optimizer: str, dtype: str) -> float:
    """Bytes that one update moves: gradient read, states and master read and written, parameter written."""
    held = state_bytes(parameters, optimizer=optimizer, dtype=dtype, zero=0, shards=1)
    return held.gradients + 2 * held.states + held.parameters


def communicator_bytes(chip: Chip, groups: int, all_to_all: bool = False) -> float:
    """Buffers of `groups` process groups of more than one rank on one device."""
    if groups == 0:
        return 0.0
    memory = chip.communicator_gib
    return (memory.first + (groups - 1) * memory.each + (memory.all_to_all if all_to_all else 0.0)) * GIB


def context_bytes(chip: Chip) -> float:
    """The runtime's own context on a device."""
    return chip.context_gib * GIB


def in_flight(schedule: str, stage: int, stages: int, micro_batches: int, virtual_stages: int = 1) -> tuple[int, ...]:
    """Most micro-batches of each chunk kept on a stage at the moment when it keeps most in all.

    gpipe: all of them. 1f1b: ``min(m, p - stage)``. interleaved (Narayanan et al., arXiv 2104.04473): forwards run ahead by
    ``2 (p - stage - 1) + (v - 1) p`` and the one under way; they walk the chunks p micro-batches at a time.
    """
    if schedule == "gpipe":
        return (micro_batches,) * virtual_stages
    if schedule == "1f1b":
        return (min(micro_batches, stages - stage),)
    ahead = 2 * (stages - stage - 1) + (virtual_stages - 1) * stages + 1
    ahead = min(ahead, micro_batches * virtual_stages)
    counts = [0] * virtual_stages
    for number in range(ahead):
        counts[number // stages % virtual_stages] += 1
    return tuple(counts)
