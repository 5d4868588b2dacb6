"""Published runs as typed rows: one measured training run each, with what its source states and nothing else.

A CSV with the columns of `COLUMNS` becomes `Run`s; an empty cell is None: the source does not say. What contradicts
itself is refused with the arithmetic (`Skip`), never repaired.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path

COLUMNS = (
    "id", "source", "model", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "gated_mlp", "vocab", "seq_len",
    "experts", "topk", "moe_ffn", "shared_expert_ffn", "dense_layers", "gpu", "gpus", "gpus_per_node", "intra_link",
    "inter_link_gbps_per_gpu", "framework", "dtype", "global_batch", "micro_batch", "dp", "tp", "sp", "pp", "vp", "cp", "ep",
    "etp", "zero_stage", "recompute", "flash_attention", "task", "step_time_s", "peak_mem_gib", "mem_definition",
    "peer_prediction", "kernels", "schedule", "async_tp", "release", "derived_fields", "notes", "tier",
)  # fmt: skip
OPTIONAL = (
    "task",
    "kernels",
    "schedule",
    "async_tp",
    "release",
    "derived_fields",
    "notes",
    "peer_prediction",
    "mem_definition",
)
ABOVE_ZERO = ("step_time_s", "peak_mem_gib", "inter_link_gbps_per_gpu")
DEFAULT_VOCABULARY = 51200
"""GPT-2's 50,257 tokens padded for eight-way tensor parallelism: where a source does not say."""


class Skip(Exception):
    """A row that cannot be priced: the kind of reason, and the detail for this row."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


@dataclass(frozen=True)
class Run:
    """One row; sizes in elements, tokens and sequences, times in seconds. None: not stated."""

    id: str
    file: str
    model: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocabulary: int
    seq_len: int
    task: str
    experts: int
    topk: int
    moe_ffn: int
    shared_ffn: int
    dense_layers: int
    gpu: str
    gpus: int
    gpus_per_node: int
    gigabits_per_gpu: float | None
    framework: str
    dtype: str
    global_batch: int
    micro_batch: int | None
    dp: int
    tp: int
    sp: bool | None
    pp: int
    vp: int | None
    cp: int
    ep: int
    etp: int | None
    zero: int | None
    zero_group: int | None
    """Ranks that share one set of states, where fewer than all replicas do."""
    recompute: str | None
    flash: bool | None
    seconds: float | None
    memory_gib: float | None
    memory_definition: str
    peer: str
    kernels: str
    schedule: str
    async_tp: bool
    release: str
    words: str
    """Everything the source says in prose: notes, derived fields, links."""
    tier: str

    @property
    def source(self) -> str:
        """The file's stem; halves of one study count as one source."""
        return re.sub(r"_(single|multi)_node$|_(large|small_mem)$", "", self.file)

    @property
    def group(self) -> tuple[str, str, int, int, int]:
        """Rows that differ in their plan alone."""
        return (self.source, self.model, self.gpus, self.global_batch, self.seq_len)

    @property
    def plan_key(self) -> tuple[object, ...]:
        """What tells plans apart, release and measurement aside."""
        return (
            self.source, self.model, self.layers, self.seq_len, self.gpu, self.gpus, self.framework.split(" ")[0], self.dtype,
            self.global_batch, self.micro_batch, self.dp, self.tp, self.sp, self.pp, self.vp, self.cp, self.ep, self.etp,
            self.zero, self.recompute, self.kernels, self.schedule, self.async_tp, self.words if not self.release else "",
        )  # fmt: skip


def read_folder(folder: Path) -> tuple[list[Run], list[tuple[str, str, Skip]]]:
    """All rows of a folder's CSV files: the runs, and (file, id, why) of the rows that are none."""
    runs: list[Run] = []
    skipped: list[tuple[str, str, Skip]] = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ()) and name not in OPTIONAL]
            for number, cells in enumerate(reader, start=2):
                identity = cells.get("id") or f"line {number}"
                try:
                    if missing:
                        raise Skip("missing columns", ", ".join(missing))
                    if len(cells) > len(reader.fieldnames or ()):
                        raise Skip("unreadable", f"more cells than the {len(reader.fieldnames or ())} columns")
                    runs.append(run_of(cells, path.stem, identity))
                except Skip as reason:
                    skipped.append((path.stem, identity, reason))
    return runs, skipped


def run_of(cells: dict[str, str | None], file: str, identity: str) -> Run:
    """One row as a Run. Raises Skip where it does not state enough, or contradicts itself."""
    read = _Cells(cells)
    gpus, tp, pp, cp = read.count("gpus"), read.degree("tp"), read.degree("pp"), read.degree("cp")
    if gpus % (tp * pp * cp):
        raise Skip("contradictory", f"tp({tp}) * pp({pp}) * cp({cp}) = {tp * pp * cp} does not divide gpus({gpus})")
    dp = read.count("dp", gpus // (tp * pp * cp))
    if tp * pp * cp * dp != gpus:
        raise Skip(
            "contradictory", f"tp({tp}) * pp({pp}) * cp({cp}) * dp({dp}) = {tp * pp * cp * dp}, but gpus = {gpus}"
        )
    heads, hidden = read.count("heads"), read.count("hidden")
    kv_heads = read.count("kv_heads", heads)
    if heads % kv_heads:
        raise Skip("contradictory", f"kv_heads({kv_heads}) does not divide heads({heads})")
    experts, topk = read.count("experts", 0), read.count("topk", 0)
    if topk > experts:
        raise Skip("contradictory", f"topk({topk}) of experts({experts})")
    seconds = read.number("step_time_s")
    return Run(
        id=identity,
        file=file,
        model=read.text("model"),
        layers=read.count("layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=read.count("head_dim", max(hidden // heads, 1)),
        ffn=read.count("ffn", 4 * hidden),
        gated=bool(read.count("gated_mlp", 0)),
        vocabulary=read.count("vocab", DEFAULT_VOCABULARY),
        seq_len=read.count("seq_len"),
        task=read.text("task"),
        experts=experts,
        topk=topk,
        moe_ffn=read.count("moe_ffn", 0),
        shared_ffn=read.count("shared_expert_ffn", 0),
        dense_layers=read.count("dense_layers", 0),
        gpu=read.text("gpu"),
        gpus=gpus,
        gpus_per_node=read.count("gpus_per_node", 8),
        gigabits_per_gpu=read.number("inter_link_gbps_per_gpu"),
        framework=read.text("framework"),
        dtype=read.text("dtype") or "bf16",
        global_batch=read.count("global_batch", _least_batch(read, dp, pp, seconds)),
        micro_batch=read.optional("micro_batch", least=1),
        dp=dp,
        tp=tp,
        sp=read.flag("sp"),
        pp=pp,
        vp=read.optional("vp"),
        cp=cp,
        ep=read.degree("ep"),
        etp=read.optional("etp", least=1),
        zero=read.optional("zero_stage", most=3),
        zero_group=_zero_group(read.text("notes")),
        recompute=read.choice("recompute", ("none", "selective", "full")) or None,
        flash=read.flag("flash_attention"),
        seconds=seconds,
        memory_gib=read.number("peak_mem_gib"),
        memory_definition=read.text("mem_definition"),
        peer=read.text("peer_prediction"),
        kernels=read.choice("kernels", ("eager", "compiled", "fused")),
        schedule=read.choice("schedule", ("1f1b", "interleaved", "interleaved 1f1b", "gpipe")),
        async_tp=bool(read.flag("async_tp")),
        release=read.text("release"),
        words="; ".join(read.text(name) for name in ("notes", "derived_fields", "intra_link")),
        tier=read.text("tier"),
    )


def _least_batch(read: _Cells, dp: int, pp: int, seconds: float | None) -> int | None:
    """Where memory alone is stated, enough micro-batches to fill the pipeline; a time without its batch says nothing."""
    is_memory_only = seconds is None or read.text("tier") == "M"
    return dp * pp * read.count("micro_batch", 1) if is_memory_only else None


def _zero_group(notes: str) -> int | None:
    """``zero1 group size 8``, ``FSDP group 64`` or ``FSDP=64``; -1 stands for all."""
    found = re.search(r"(?:(?:zero1|FSDP) group (?:size )?|\bFSDP=)(-?\d+)", notes)
    return int(found.group(1)) if found and int(found.group(1)) > 0 else None


class _Cells:
    """A row's cells by kind. Raises Skip."""

    def __init__(self, cells: dict[str, str | None]) -> None:
        self.cells = cells

    def text(self, name: str) -> str:
        return (self.cells.get(name) or "").strip()

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self.text(name).lower()
        if value and value not in allowed:
            raise Skip("unreadable", f"{name} = {value!r}; allowed: {', '.join(allowed)}")
        return value

    def number(self, name: str) -> float | None:
        """A finite number of 0 or more; what is measured or provided is above 0."""
        value = self.text(name)
        if not value:
            return None
        try:
            number = float(value)
        except ValueError:
            raise Skip("unreadable", f"{name} = {value!r} is no number") from None
        if not isfinite(number):
            raise Skip("unreadable", f"{name} = {value}")
        if number < 0 or (number == 0 and name in ABOVE_ZERO):
            raise Skip("contradictory", f"{name} = {value}")
        return number

    def optional(self, name: str, least: int = 0, most: float = inf) -> int | None:
        value = self.number(name)
        if value is None:
            return None
        if value != int(value):
            raise Skip("unreadable", f"{name} = {value} is no count")
        if not least <= value <= most:
            raise Skip("contradictory", f"{name} = {int(value)}")
        return int(value)

    def count(self, name: str, default: int | None = None) -> int:
        """A count; 0 stands for what is not there (experts), so the default holds."""
        value = self.optional(name)
        if value is None or (value == 0 and default is not None):
            if default is None:
                raise Skip("not stated", name)
            return default
        if value == 0:
            raise Skip("contradictory", f"{name} = 0")
        return value

    def degree(self, name: str) -> int:
        """How many ways something is divided: 1 where nothing is said, never 0."""
        return self.optional(name, least=1) or 1

    def flag(self, name: str) -> bool | None:
        value = self.optional(name, most=1)
        return None if value is None else bool(value)


def one_release_each(runs: list[Run]) -> Iterator[Run]:
    """Of plans that repeat from release to release, the newest."""
    newest: dict[tuple[object, ...], Run] = {}
    for run in runs:
        key = run.plan_key if run.release else (run.file, run.id)
        if key not in newest or _version(run.release) > _version(newest[key].release):
            newest[key] = run
    yield from newest.values()


def _version(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release))
