"""Plan in, Timeline out.

    seconds_by_part[part] = mean over ranks of exclusive time on the compute stream

An action's own work is compute, recompute, overhead and the exposed part of its collectives. A rank that waits for an
input waits for `pp` while that input is on its way (in flight, or queued behind another send), and in the bubble while
it is not yet computed; time lost to gathers and reductions is `dp`; waiting for the slowest rank at the end is bubble.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import fsum, isfinite

from autopar.documents.plan import PARTS, Plan
from autopar.documents.timeline import Timeline
from autopar.errors import RequestError
from autopar.simulator.engine import Rank, Run, run
from autopar.simulator.memory import memory
from autopar.simulator.spans import spans


def simulate(plan: Plan, *, slow: Mapping[int, float] | None = None) -> Timeline:
    """One training step of `plan`, from its costs alone; the same plan gives the same Timeline, bit for bit.

    slow: pp rank -> factor (> 0) on its compute, recompute and optimizer: a straggler, seen from the replica that has
    it, which is the one all others wait for. Raises RequestError for a rank or a factor that cannot be.
    """
    done = run(plan, _checked(slow or {}, plan.mesh.pp))
    curves, peaks = memory(plan.costs, done)
    return Timeline(
        plan_hash=plan.hash,
        step_seconds=done.step_seconds,
        seconds_by_part=seconds_by_part(done),
        peak_bytes=peaks,
        spans=spans(done, plan.mesh.pp),
        memory=curves,
    )


def score(plan: Plan) -> float:
    """Seconds of one step, without spans and curves: what a search compares."""
    return run(plan, {}).step_seconds


def _checked(slow: Mapping[int, float], pp: int) -> Mapping[int, float]:
    for rank, factor in slow.items():
        if rank not in range(pp):
            raise RequestError(f"straggler: rank {rank} is not a pipeline rank; the plan has pp = {pp}: 0 to {pp - 1}")
        if not (isfinite(factor) and factor > 0):
            raise RequestError(f"straggler: slow={factor} on rank {rank}; expected a factor above 0, e.g. 1.2")
    return slow


def seconds_by_part(done: Run) -> dict[str, float]:
    """Mean over ranks of each part; `math.fsum` of the values is the step's seconds exactly."""
    by_rank = [_parts(rank, done.step_seconds) for rank in done.ranks]
    parts = {part: fsum(one[part] for one in by_rank) / len(by_rank) for part in PARTS}
    # Rounding of sums leaves a last digit or two; the largest part whose own digits are fine enough takes it.
    for part in sorted(parts, key=lambda name: -parts[name]):
        if fsum(parts.values()) == done.step_seconds:
            break
        parts[part] = fsum((done.step_seconds, *(-seconds for name, seconds in parts.items() if name != part)))
    return parts


def _parts(rank: Rank, step_seconds: float) -> dict[str, float]:
    parts = dict.fromkeys(PARTS, 0.0)
    # Every task runs once per micro-batch.
    micro_batches = len(rank.order) // (2 * len(rank.tasks))
    for task in (task for phases in rank.tasks for task in phases):
        for part, seconds in task.parts.items():
            parts[part] += micro_batches * seconds
    parts["pp"] += rank.pp_seconds
    parts["dp"] += rank.dp_seconds
    parts["optimizer"] += rank.optimizer_seconds
    parts["bubble"] += rank.bubble_seconds + step_seconds - rank.free
    return parts
