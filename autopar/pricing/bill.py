"""What a price depends on, and what it says: the setting and the bill of one block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autopar.documents.plan import Collective
from cost_models.compute import Kernels, element_bytes
from hardware_profiles.chip import Chip
from hardware_profiles.cluster import Group


@dataclass(frozen=True)
class RecomputePrice:
    """One entry of the recompute menu: bytes kept per micro-batch, extra seconds in backward, collectives run again."""

    mode: Literal["none", "selective", "full"]
    keep: tuple[str, ...]
    saved_bytes: float
    seconds: float
    collectives: tuple[Collective, ...] = ()
    overhead_seconds: float = 0.0
    """Of the host, beyond the device's."""


@dataclass(frozen=True)
class BlockPrice:
    """One block of a class on one rank, for one micro-batch."""

    forward_seconds: float
    backward_seconds: float
    forward_overhead_seconds: float
    backward_overhead_seconds: float
    forward_collectives: tuple[Collective, ...]
    backward_collectives: tuple[Collective, ...]
    recompute: Mapping[str, RecomputePrice]
    parameter_elements: float
    """On this rank, trainable."""
    frozen_elements: float = 0.0
    expert_elements: float = 0.0
    """Of the trainable ones, those that are divided over ep."""
    workspace_bytes: float = 0.0
    """Most bytes of passing tensors alive at once in backward."""
    output_bytes: float = 0.0
    """What is handed to the next block."""
    scores_bytes: float = 0.0
    """What a model's end hands to its loss: the largest result of its products."""


@dataclass(frozen=True)
class Setting:
    """What a price depends on beside the class and its division."""

    chip: Chip
    dtype: str
    kernels: Kernels
    degree: int
    group: Group
    seq_len: int
    executor: str = "autopar"
    """Whose habits (`cost_models.executors`)."""
    cp: int = 1
    """Ranks that share each sequence, and what they see of each other."""
    cp_group: Group | None = None
    ep: int = 1
    """Ranks that share the experts, what they see of each other, and the degree of tp inside an expert."""
    ep_group: Group | None = None
    etp: int = 1
    imbalance: float = 1.0
    """Rows of the ep rank with most over the mean."""

    @property
    def activations(self) -> str:
        """The dtype of activations: linear layers alone compute in fp8 or less."""
        return self.dtype if element_bytes(self.dtype) >= 2 else "bf16"
