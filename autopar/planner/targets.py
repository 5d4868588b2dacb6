"""Who carries a plan out: which axes, schedules and ZeRO stages are offered, and whose habits are priced.

Sources: the argument checks of Megatron-LM (distributed optimizer: states over dp, gradients and parameters whole; tensor with
expert parallelism needs sequence parallelism) and the parallel dims of torchtitan (FSDP2 or plain replicas, 1F1B, GPipe,
interleaved).
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.in_flight import Schedule


@dataclass(frozen=True)
class Target:
    """What one framework carries out beside pp, dp and tp."""

    executor: str
    """Its habits, by name in `cost_models.executors`."""
    axes: frozenset[str] = frozenset()
    """Of cp, ep, etp: what the search offers."""
    schedules: tuple[Schedule, ...] = ("1f1b", "gpipe", "interleaved")
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    ep_needs_sp: bool = False
    """Under tp."""


TARGETS = {
    "run": Target("autopar"),
    "megatron": Target("megatron", frozenset({"cp", "ep", "etp"}), ("1f1b", "interleaved"), (0, 1), ep_needs_sp=True),
    "torchtitan": Target("torchtitan", frozenset({"cp", "ep", "etp"}), zeros=(0, 2, 3)),
}
