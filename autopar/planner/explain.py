"""A plan in words: one screen for ``autopar plan``, the reasons for ``autopar explain``, the difference of two plans."""

from __future__ import annotations

from autopar.documents.plan import PARTS, Alternative, Mesh, Plan
from cost_models.in_flight import activation_peak
from hardware_profiles.chip import GIB

PART_NAMES = {
    "compute": "compute",
    "recompute": "recomputed activations",
    "tp": "tensor-parallel collectives",
    "cp": "context-parallel collectives",
    "ep": "expert all-to-alls",
    "pp": "pipeline sends",
    "dp": "gradient reduction and parameter gathers",
    "offload": "host copies",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "overhead": "host and launches",
}
STATED = ("moe_imbalance", "target", "fixed", "forbidden")
"""Options of a plan that say what was asked or assumed."""
WORTH_SAYING = 0.002
"""Parts below this share of the step are not listed."""


def one_line(plan: Plan) -> str:
    """``pp=8 tp=8 dp=16 zero=1 ...``."""
    mesh, schedule = plan.mesh, plan.schedule
    words = [degrees(mesh), f"zero={plan.stages[0].zero}"]
    if mesh.tp > 1:
        words.append(f"sp={int(bool(plan.options.get('sp')))}")
    words += [f"micro_batch={schedule.micro_batch}", f"schedule={schedule.name}"]
    if schedule.virtual_stages > 1:
        words.append(f"virtual_stages={schedule.virtual_stages}")
    return " ".join([*words, f"recompute={recompute_words(plan)}"])


def degrees(mesh: Mesh) -> str:
    """``pp=8 tp=8 dp=16``, with cp, ep and etp where they divide."""
    words = [f"pp={mesh.pp}", f"tp={mesh.tp}", f"dp={mesh.dp}"]
    words += [f"{name}={size}" for name, size in (("cp", mesh.cp), ("ep", mesh.ep)) if size > 1]
    return " ".join([*words, f"etp={mesh.etp}"] if mesh.ep > 1 and mesh.tp > 1 else words)


def recompute_words(plan: Plan) -> str:
    """``none``, ``full``, or how many blocks take each mode."""
    counts: dict[str, int] = {}
    for item in plan.recompute:
        counts[item.mode] = counts.get(item.mode, 0) + item.blocks[1] - item.blocks[0] + 1
    if len(counts) <= 1:
        return next(iter(counts), "none")
    return "+".join(f"{mode}:{count}" for mode, count in counts.items())


def summary(plan: Plan) -> str:
    """One screen: the plan, its figures, the nearest alternatives, the certificate."""
    p, devices = plan.predicted, plan.mesh.devices
    w = plan.workload
    length = f" seq_len={w.seq_len}" if w.unit == "tokens" else ""
    lines = [
        f"{plan.model.spec} ({_count(plan.model.parameters)} parameters) on {devices} devices of {plan.cluster.name}",
        f"workload  global_batch={w.global_batch}{length} dtype={w.dtype} optimizer={w.optimizer} "
        f"kernels={w.kernels} memory_margin={float(plan.options.get('memory_margin', 0)):.0%} objective=time"
        + "".join(f" {key}={plan.options[key]}" for key in STATED if plan.options.get(key)),
        f"plan      {one_line(plan)}",
        f"step      {seconds(p.step_seconds)}  (80 % interval {seconds(p.step_seconds_low)} to {seconds(p.step_seconds_high)})",
        f"rate      {p.tokens_per_second / devices:,.0f} {w.unit}/s/device, {p.tokens_per_second:,.0f} {w.unit}/s",
        f"MFU       {p.mfu:.1%} (full attention counted, recompute not)",
        *_memory_lines(plan),
        f"parts     {_parts(p.seconds_by_part, p.step_seconds)}",
        f"stages    {_stages(plan)}",
    ]
    if plan.alternatives:
        lines.append("next best")
        lines += [f"  {_alternative(plan, item)}" for item in plan.alternatives]
    lines += [*(f"note      {_short(note)}" for note in (*plan.numerics, *plan.notes)), *_certificate(plan)]
    return "\n".join(lines)


def _short(note: str, most: int = 170) -> str:
    return note if len(note) <= most else note[: most - 3] + "..."


def explain_plan(plan: Plan) -> str:
    """Why this plan, what each stage holds as a table that adds up, what comes next."""
    full = [f"  {note}" for note in plan.notes if _short(note) != note]
    notes = ["", "notes in full", *full] if full else []
    return "\n".join([summary(plan), "", *_reasons(plan), "", *_memory_table(plan), *notes])


def compare_plans(plan: Plan, other: Plan) -> str:
    """What differs between two plans of one model, part by part."""
    a, b = plan.predicted, other.predicted
    lines = [
        f"this   {one_line(plan)}: {seconds(a.step_seconds)}",
        f"other  {one_line(other)}: {seconds(b.step_seconds)}",
        f"the other takes {b.step_seconds / a.step_seconds:.3f} times as long:",
    ]
    for name in PARTS:
        difference = b.seconds_by_part.get(name, 0.0) - a.seconds_by_part.get(name, 0.0)
        if abs(difference) > WORTH_SAYING * a.step_seconds:
            lines.append(f"  {difference:+.4g} s  {PART_NAMES[name]}")
    lines.append(f"peak memory {max(a.peak_bytes) / GIB:.1f} GiB against {max(b.peak_bytes) / GIB:.1f} GiB")
    return "\n".join(lines)


def seconds(value: float) -> str:
    """``12.3 s`` or ``45.6 ms``."""
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


def _count(value: int) -> str:
    """``8.03B``, ``25.56M``, ``1.20K``."""
    size, letter = next(
        ((size, letter) for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if value >= size), (1, "")
    )
    return f"{value / size:.2f}{letter}" if letter else str(value)


def _memory_lines(plan: Plan) -> list[str]:
    p = plan.predicted
    stages = _ranges([f"{peak / GIB:.1f}" for peak in p.peak_bytes])
    return [f"memory    peak by stage in GiB, of {min(p.capacity_bytes) / GIB:.1f}: {stages}"]


def _ranges(values: list[str], most: int = 10) -> str:
    """Equal neighbours said once, cut where there are very many."""
    parts, start = [], 0
    for end in range(1, len(values) + 1):
        if end == len(values) or values[end] != values[start]:
            name = f"{start}" if end - start == 1 else f"{start}-{end - 1}"
            parts.append(f"[{name}] {values[start]}")
            start = end
    return "  ".join(parts) if len(parts) <= most else "  ".join([*parts[: most - 2], "...", parts[-1]])


def _parts(parts: dict[str, float], step: float) -> str:
    always = ("bubble", "tp", "dp", "ep") if parts.get("ep") else ("bubble", "tp", "dp")
    named = ((value, name) for name, value in parts.items() if value > WORTH_SAYING * step or name in always)
    shown = sorted(named, reverse=True)
    return ", ".join(f"{name} {value / step:.1%}" for value, name in shown)


def _stages(plan: Plan) -> str:
    sizes = []
    for stage in plan.stages:
        blocks = sum(last - first + 1 for chunk in stage.chunks for first, last in chunk.values())
        sizes.append(str(blocks))
    return f"blocks per stage {_ranges(sizes)}"


def _alternative(plan: Plan, item: Alternative) -> str:
    mesh, schedule = item.mesh, item.schedule
    slower = item.step_seconds / plan.certificate.bound_seconds - 1 if plan.certificate else 0.0
    lost = [f"{name} +{seconds(value)}" for name, value in list(item.loses_by.items())[:2]]
    words = f"{degrees(mesh)} zero={item.zero} micro_batch={schedule.micro_batch} {schedule.name}"
    return f"{words} recompute={item.recompute}: +{slower:.1%}, loses by {', '.join(lost) or 'nothing single'}"


def _certificate(plan: Plan) -> list[str]:
    c = plan.certificate
    if c is None:
        return []
    stopped = f", stopped by {c.space['stopped']}" if "stopped" in c.space else ""
    dry_run = "passed" if plan.dry_run == "passed" else "not run (a saved graph holds no code to run)"
    if plan.export_only:
        dry_run = "not run (autopar run does not carry this plan out)"
    return [
        f"certificate  {c.enumerated:,} configurations: {c.solved} solved, {c.excluded_by_bound:,} excluded by bound, "
        f"{c.infeasible} whose states alone do not fit; gap {c.gap:.2%}{stopped}",
        f"             optimal for the {c.objective} over the stated space ({c.solver}, {c.search_seconds:.2f} s)",
        f"dry run      {dry_run}",
    ]


def _reasons(plan: Plan) -> list[str]:
    """What dominates and what each choice buys, in plain words."""
    parts, step = plan.predicted.seconds_by_part, plan.predicted.step_seconds
    top = sorted(((value, name) for name, value in parts.items() if name != "compute"), reverse=True)[:2]
    costs = (
        ", then ".join(f"{PART_NAMES[name]} ({value / step:.1%})" for value, name in top if value > 0) or "nothing else"
    )
    lines = ["why", f"  Beside compute ({parts['compute'] / step:.1%}) the step goes to {costs}."]
    p, usable = plan.predicted, 1 - float(plan.options.get("memory_margin", 0))
    room = [(capacity * usable - peak) / GIB for peak, capacity in zip(p.peak_bytes, p.capacity_bytes, strict=True)]
    tight = min(range(len(room)), key=lambda stage: room[stage])
    lines.append(f"  Memory is tightest on stage {tight}: {room[tight]:.1f} GiB are left below the margin.")
    for item in plan.alternatives[:2]:
        if item.loses_by:
            name = next(iter(item.loses_by))
            lines.append(
                f"  With {degrees(item.mesh)} {PART_NAMES[name]} would cost {seconds(item.loses_by[name])} more."
            )
    return lines


def _memory_table(plan: Plan) -> list[str]:
    """Per stage, GiB by component; each row adds up to the closed-form peak."""
    c = plan.schedule
    rows = []
    for stage, cost in enumerate(plan.costs):
        memory = dict(cost.memory)
        outside = {name: memory.pop(name) for name in ("communicators", "context") if name in memory}
        chunks = [chunk.activation_bytes for chunk in cost.chunks]
        memory["activations"] = activation_peak(c.name, stage, plan.mesh.pp, c.micro_batches, chunks)
        memory["reserve"] = sum(memory.values()) * cost.reserve_fraction
        rows.append(memory | outside)
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "stage  " + "  ".join(f"{name:>13}" for name in [*names, "sum"])
    lines = ["memory by stage, GiB", head]
    shown: list[str] = []
    for stage, row in enumerate(rows):
        cells = "  ".join(
            f"{value / GIB:13.2f}" for value in [*(row.get(name, 0.0) for name in names), sum(row.values())]
        )
        if shown and shown[-1] == cells and stage < len(rows) - 1:
            continue
        shown.append(cells)
        lines.append(f"{stage:>5}  {cells}")
    return lines
