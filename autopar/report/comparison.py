"""Predicted against measured: a plan beside the lines of its run."""

from __future__ import annotations

from autopar.documents import Plan
from autopar.documents.run_lines import RunLines
from autopar.errors import PlanMismatch
from hardware_profiles.chip import GIB

MEASURED_TOGETHER = {
    "forward and backward": ("compute", "recompute", "tp", "cp", "ep", "pp", "offload", "bubble", "overhead"),
    "gradients": ("dp",),
    "optimizer": ("optimizer",),
}
"""A part that a run times -> the parts of a prediction that fall into it; what dp hides is in neither."""


def comparison(plan: Plan, lines: RunLines) -> str:
    """Step time, its parts, rate and memory, each predicted and measured. Raises PlanMismatch for another plan's run."""
    if lines.header["plan_hash"] != plan.hash:
        raise PlanMismatch(
            f"these lines are of a run by plan {lines.header['plan_hash']}, not of {plan.hash}: give the plan that was run"
        )
    predicted, measured = plan.predicted, lines.step_seconds
    tokens = plan.workload.tokens
    inside = predicted.step_seconds_low <= measured <= predicted.step_seconds_high
    rows = [
        f"{plan.model.spec} on {lines.header['world']} ranks, {len(lines.settled)} steps after the warm-up (medians)",
        f"{'':<22}{'predicted':>12}{'measured':>12}{'error':>9}",
        _row("step, ms", predicted.step_seconds * 1e3, measured * 1e3),
    ]
    for part, names in MEASURED_TOGETHER.items():
        seconds = lines.median_of_part(part)
        if seconds is not None:
            expected = sum(predicted.seconds_by_part.get(name, 0.0) for name in names)
            rows.append(_row(f"  {part}, ms", expected * 1e3, seconds * 1e3))
    rows.append(_row(f"{plan.workload.unit}/s", tokens / predicted.step_seconds, tokens / measured))
    rows.append(_row("peak memory, GiB", max(predicted.peak_bytes) / GIB, max(lines.peak_bytes) / GIB))
    low, high = predicted.step_seconds_low * 1e3, predicted.step_seconds_high * 1e3
    rows.append(
        f"the 80 % interval, {low:.4g} to {high:.4g} ms, {'holds' if inside else 'does not hold'} the measured step"
    )
    return "\n".join(rows)


def _row(name: str, predicted: float, measured: float) -> str:
    error = f"{predicted / measured - 1:>+8.1%}" if measured > 0 else f"{'':>8}"
    return f"{name:<22}{predicted:>12,.4g}{measured:>12,.4g} {error}"
