"""The profile of this machine from what its ranks measured: rates are means over ranks, curves their slowest."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from autopar.calibrator.kernels import HEAD_DIM, KernelRates, measure_kernels, median_of
from autopar.calibrator.launch import launch_seconds
from autopar.calibrator.links import measure_links
from autopar.errors import RequestError
from hardware_profiles.chip import GIB, AttentionTable, Chip, ChipLink, Curve, Efficiency, GemmTable
from hardware_profiles.cluster import Cluster, Fabric, Host, Intra, NodeGroup

OnRanks = Callable[[int, Callable[[int], Any], timedelta], list[Any]]
TIMEOUT = timedelta(minutes=5)
PASSES = 3
WINDOW_SECONDS = {True: 0.04, False: 0.2}
"""For one measurement of a kernel: quick, thorough."""
REPEATS = {True: 1.0, False: 5.0}
CONTEXT_BYTES = 0.3e9
"""A process that imported torch (resident set of a CPU build)."""


def calibrate(
    on_ranks: OnRanks,
    operators: int,
    ranks: int | None,
    *,
    quick: bool,
    report: Callable[[str], None] | None = None,
) -> Cluster:
    """Measure `ranks` processes started by `on_ranks` (default: the machine's GPUs, else its cores).

    `operators` is the count of those of a `launch.Probe` that are no views, as a Graph of it has them.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = ranks or gpus or os.cpu_count() or 1
    if gpus and count > gpus:
        raise RequestError(f"--ranks {count}: this machine has {gpus} GPUs; measure at most one rank on each")
    (report or (lambda text: None))(f"measuring {count} ranks at once ({'quick' if quick else 'thorough'})")
    measured = on_ranks(count, lambda rank: _measure(count, operators, quick), TIMEOUT)
    rates: list[KernelRates] = [one for one, _, _ in measured]
    launch = fmean(seconds for _, seconds, _ in measured)
    curves = _slowest([curves for _, _, curves in measured])
    return _cluster(count, _chip(rates, launch, count, gpus > 0), curves, gpus > 0)


def _measure(count: int, operators: int, quick: bool) -> tuple[KernelRates, float, list[Curve]]:
    """On one rank of a process group."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    groups = {size: _group(size) for size in range(2, count + 1) if count % size == 0}
    window = WINDOW_SECONDS[quick]
    rates, launches = [], []
    for _ in range(PASSES):
        rates.append(measure_kernels(device, window, dist.barrier))
        launches.append(launch_seconds(operators, device, 5 * window, dist.barrier))
    return median_of(rates), median(launches), measure_links(device, groups, REPEATS[quick])


def _group(size: int) -> dist.ProcessGroup:
    """Join this rank with its neighbours; all ranks make all groups."""
    own = None
    for first in range(0, dist.get_world_size(), size):
        members = list(range(first, first + size))
        group = dist.new_group(members)
        own = group if dist.get_rank() in members else own
    assert isinstance(own, dist.ProcessGroup)
    return own


def _slowest(by_rank: Sequence[Sequence[Curve]]) -> tuple[Curve, ...]:
    """The curves of all ranks as one; a larger buffer never takes less time than a smaller one, which noise may pretend."""
    found = []
    for same in zip(*by_rank, strict=True):
        slowest = [max(times) for times in zip(*(curve.seconds for curve in same), strict=True)]
        rising = [max(slowest[: number + 1]) for number in range(len(slowest))]
        source = "autopar calibrate: the slowest rank's mean"
        found.append(same[0].model_copy(update={"seconds": tuple(_rounded(t) for t in rising), "source": source}))
    return tuple(found)


def _chip(rates: Sequence[KernelRates], launch: float, count: int, is_gpu: bool) -> Chip:
    gemm = {name: {n: fmean(one.gemm[name][n] for one in rates) for n in rates[0].gemm[name]} for name in rates[0].gemm}
    peaks = {name: max(table.values()) for name, table in gemm.items()}
    pointwise = {name: fmean(one.pointwise[name] for one in rates) for name in rates[0].pointwise}
    bandwidth = max(pointwise.values())
    source = f"autopar calibrate on {platform.node() or 'this machine'}, {datetime.now(UTC):%Y-%m-%d}"
    tables = tuple(
        GemmTable(
            dtype=name,
            min_dim=tuple(table),
            fraction_of_peak=tuple(_rounded(rate / peaks[name]) for rate in table.values()),
            source=source,
        )
        for name, table in gemm.items()
    )
    attention = tuple(_attention(phase, rates, peaks["fp32"], source) for phase in ("forward", "backward"))
    memory = torch.cuda.get_device_properties(0).total_memory if is_gpu else _host_bytes() / count
    return Chip(
        name=torch.cuda.get_device_name(0) if is_gpu else f"cpu-{platform.machine()}",
        vendor="nvidia" if is_gpu else "any",
        source=source,
        memory_gib=_rounded(memory / GIB),
        memory_gigabytes_per_second=_rounded(bandwidth / 1e9),
        teraflops={name: _rounded(peak / 1e12) for name, peak in peaks.items()},
        launch_us=_rounded(launch * 1e6),
        # On a CPU the operator runs where it is issued: its cost is in launch_us already.
        host_us=6.0 if is_gpu else 0.0,
        link=ChipLink(kind="none", gigabytes_per_second=1.0),
        context_gib=_rounded(CONTEXT_BYTES / GIB),
        efficiency=Efficiency(
            gemm=tables,
            attention=attention,
            pointwise={name: _rounded(rate / bandwidth) for name, rate in pointwise.items()},
            source=source,
        ),
    )


def _attention(phase: Any, rates: Sequence[KernelRates], peak: float, source: str) -> AttentionTable:
    table = {seq: fmean(one.attention[phase][seq] for one in rates) for seq in rates[0].attention[phase]}
    return AttentionTable(
        phase=phase,
        head_dim=HEAD_DIM,
        seq=tuple(table),
        fraction_of_peak=tuple(_rounded(min(rate / peak, 1.0)) for rate in table.values()),
        source=source,
    )


def _cluster(count: int, chip: Chip, curves: tuple[Curve, ...], is_gpu: bool) -> Cluster:
    """One node of `count` devices. Where no curve was measured, the largest all-reduce's rate and the smallest's time serve."""
    reduce = next((curve for curve in reversed(curves) if curve.kind == "all_reduce"), None)
    bandwidth, latency = 10e9, 10e-6
    if reduce is not None:
        bandwidth = 2 * (reduce.ranks - 1) / reduce.ranks * reduce.bytes[-1] / reduce.seconds[-1]
        latency = reduce.seconds[0] / (2 * (reduce.ranks - 1))
    node = NodeGroup(
        name="nodes",
        nodes=1,
        chip=chip,
        devices_per_node=count,
        intra=Intra(
            kind="pcie" if is_gpu else "shared_memory",
            gigabytes_per_second=_rounded(bandwidth / 1e9),
            latency_us=_rounded(latency * 1e6),
        ),
        host=Host(
            memory_gib=_rounded(_host_bytes() / GIB),
            cores=os.cpu_count() or 1,
            to_device_gigabytes_per_second=chip.memory_gigabytes_per_second if not is_gpu else 10.0,
            shared_by_devices=count,
        ),
    )
    name = f"{platform.node() or 'local'}-x{count}"
    return Cluster(name=name, source=chip.source, node_groups=(node,), fabric=Fabric(kind="single_node"), curves=curves)


def _host_bytes() -> float:
    """Memory this process may use: the machine's, or less where a container says so."""
    pages = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return min(pages, float(text)) if text.isdigit() else pages


def _rounded(value: float, digits: int = 4) -> float:
    """To a few significant digits: more is noise."""
    return float(f"{value:.{digits}g}")
