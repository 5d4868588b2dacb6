"""Measured fused attention -> tables of the fraction of peak by sequence length, and their held-out errors."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from distill_fit import SEQS, fit, held_out, rows

from cost_models.compute import attention_seconds
from hardware_profiles.chip import AttentionTable, Chip


def attention_data(folder: Path, device: str) -> dict[tuple[str, bool, int], list[tuple[str, float, float, float]]]:
    """(phase, causal, head dim) -> rows of (key, seq, fraction-free FLOP/s, seconds), executed FLOPs (causal: half)."""
    found: dict[tuple[str, bool, int], list[tuple[str, float, float, float]]] = defaultdict(list)
    for row in rows(folder, "attention_aiconfigurator.csv"):
        b, s, h, _, d = (int(v) for v in re.findall(r"[a-z]+(\d+)", row["shape_or_bytes"]))
        if row["device"] == device and b * h >= 16:
            rate = float(row["value"]) * 1e12
            found["forward", True, d].append((row["shape_or_bytes"], s, rate, 2 * s * s * d * h * b / rate))
    return found


def attention_tables(
    chip: Chip, found: dict[tuple[str, bool, int], list[tuple[str, float, float, float]]], source: str, everything: bool
) -> list[AttentionTable]:
    tables = []
    for (phase, causal, head_dim), data in sorted(found.items()):
        kept = [item for item in data if everything or not held_out(item[0])]
        seq = np.array([item[1] for item in kept])
        seconds = np.array([item[3] for item in kept])
        ideal = np.array([item[2] for item in kept]) * seconds / chip.peak_flops("bf16")
        points, values = fit(seq, ideal, 0.0 * seconds, seconds - chip.launch_seconds, SEQS, smoothness=0.0)
        tables.append(
            AttentionTable(
                phase=phase, causal=causal, head_dim=head_dim, seq=points, fraction_of_peak=values, source=source
            )
        )
    return tables


def attention_errors(chip: Chip, found: dict[tuple[str, bool, int], list[tuple[str, float, float, float]]]) -> None:
    for (phase, causal, head_dim), data in sorted(found.items()):
        errors = [
            abs(
                attention_seconds(
                    chip, rate * seconds, 0.0, phase=phase, seq=seq, head_dim=head_dim, causal=causal, dtype="bf16"
                )
                / seconds
                - 1
            )
            for key, seq, rate, seconds in data
            if held_out(key)
        ]
        print(f"  attention {phase} head dim {head_dim}: {np.mean(errors):.1%} on {len(errors)} held-out shapes")


def published_attention(folder: Path, device: str, chip: Chip, prefix: str, source: str) -> list[AttentionTable]:
    """Tables read off a paper's points, unfitted: phase and head dim from the operator's name."""
    points: dict[tuple[str, bool, int], list[tuple[float, float]]] = defaultdict(list)
    for row in rows(folder, "attention.csv"):
        name = re.fullmatch(rf"{prefix}_(fwd|bwd)(?:_fp16)?_(causal|noncausal)_hd(\d+)", row["op"])
        if name and row["device"] == device:
            key = ("forward" if name[1] == "fwd" else "backward", name[2] == "causal", int(name[3]))
            seq = re.match(r"seq(\d+)", row["shape_or_bytes"])
            assert seq is not None
            points[key].append((float(seq[1]), float(row["value"]) * 1e12 / chip.peak_flops("fp16")))
    for (phase, causal, width), values in list(points.items()):
        # causal backward is not in the papers: its non-causal rate, slowed as causal forward is against non-causal
        if phase == "backward" and not causal and ("backward", True, width) not in points:
            slower, full = dict(points["forward", True, width]), dict(points["forward", False, width])
            points["backward", True, width] = [
                (s, rate * slower[s] / full[s]) for s, rate in values if s in slower and s in full
            ]
    return [
        AttentionTable(
            kernel="flash" if prefix == "FA2" else "cudnn",
            phase=phase,
            causal=causal,
            head_dim=width,
            seq=tuple(seq for seq, _ in sorted(values)),
            fraction_of_peak=tuple(round(value, 3) for _, value in sorted(values)),
            source=source,
        )
        for (phase, causal, width), values in sorted(points.items())
    ]


def scaled(table: AttentionTable, factor: float, source: str, **changes: Any) -> AttentionTable:
    fractions = tuple(round(min(value * factor, 1.0), 3) for value in table.fraction_of_peak)
    return table.model_copy(update={"fraction_of_peak": fractions, "source": source, **changes})


def simumax_ratio(folder: Path, device: str) -> float:
    """Backward over forward FLOP/s, each executed (backward 2.5 forward), 32 heads and more, head dim 128."""
    rates: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows(folder, "attention.csv"):
        heads = re.search(r"head_num=(\d+);.*qk_head_dim=128", row["shape_or_bytes"])
        if row["device"] == device and row["op"].startswith("sdp_") and heads and int(heads[1]) >= 32:
            rates[row["shape_or_bytes"]][row["op"][4:7]] = float(row["value"])
    return float(np.median([pair["bwd"] / pair["fwd"] for pair in rates.values() if len(pair) == 2]))
