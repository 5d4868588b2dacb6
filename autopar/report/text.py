"""A Timeline in words and numbers."""

from __future__ import annotations

import json

from autopar.documents import Plan, Timeline
from autopar.documents.run_lines import RunLines
from hardware_profiles.chip import GIB


def timeline_summary(plan: Plan, line: Timeline) -> str:
    """Step time, its parts and the peak of every pp rank, on one screen."""
    tokens = plan.workload.tokens
    rows = [
        f"step {line.step_seconds:.4g} s, {tokens / line.step_seconds / plan.mesh.devices:,.0f} {plan.workload.unit}/s/device"
    ]
    for name, seconds in line.seconds_by_part.items():
        if seconds > 0:
            rows.append(f"  {name:<10} {seconds:>10.4g} s {seconds / line.step_seconds:>7.1%}")
    rows.append("peak memory by pp rank (GiB): " + ranges([round(peak / GIB, 1) for peak in line.peak_bytes]))
    return "\n".join(rows)


def timeline_json(line: Timeline) -> str:
    """Step time, parts and peaks as JSON; spans stay in the Timeline file."""
    return json.dumps(line.model_dump(include={"step_seconds", "seconds_by_part", "peak_bytes"}), indent=1)


def run_summary(plan: Plan, lines: RunLines) -> str:
    """What a run came to, in three lines; and what to do where the prediction was far off."""
    if not lines.steps:
        return "no step was left to train"
    first, last = lines.steps[0], lines.steps[-1]
    measured, predicted = lines.step_seconds, plan.predicted.step_seconds
    tokens = plan.workload.tokens
    is_inside = plan.predicted.step_seconds_low <= measured <= plan.predicted.step_seconds_high
    far_off = (
        f"outside the predicted interval: `autopar calibrate -o here.yaml` measures this machine, to plan for in place of "
        f"{plan.cluster.name}"
    )
    return "\n".join(
        (
            f"loss {first['loss']:.4f} at step {first['step']}, {last['loss']:.4f} at step {last['step']}",
            f"step {measured * 1e3:,.4g} ms measured (median), {predicted * 1e3:,.4g} ms predicted "
            f"({predicted / measured - 1:+.1%}); {tokens / measured:,.0f} {plan.workload.unit}/s",
            f"peak memory {max(lines.peak_bytes) / GIB:.3g} GiB measured, {max(plan.predicted.peak_bytes) / GIB:.3g} predicted",
            *(() if is_inside else (far_off,)),
        )
    )


def run_json(lines: RunLines) -> str:
    """The run's lines as they are written to a file."""
    return "\n".join(json.dumps(line) for line in (lines.header, *lines.steps))


def ranges(values: list[float]) -> str:
    """Equal neighbours said once: ``0-3: 61.2, 4: 58.0``."""
    parts: list[str] = []
    start = 0
    for end in range(1, len(values) + 1):
        if end == len(values) or values[end] != values[start]:
            name = f"{start}" if end - start == 1 else f"{start}-{end - 1}"
            parts.append(f"{name}: {values[start]:.1f}")
            start = end
    return ", ".join(parts)
