"""A chip: what one device can do, with the tables that measured it.

Files use people's units (GiB, gigabytes per second, teraflops, microseconds); properties give bytes, seconds, FLOP/s.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hardware_profiles.schema import Facts, OrText

GIB = 2**30
DTYPE_NAMES = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16", "fp32": "fp32",
    "float32": "fp32", "float": "fp32", "tf32": "tf32", "fp64": "fp64", "float64": "fp64", "double": "fp64",
    "fp8": "fp8", "float8": "fp8", "fp8-cs": "fp8", "fp8-mx": "fp8", "mxfp8": "fp8", "int8": "int8",
    "nvfp4": "nvfp4", "fp4": "nvfp4",
}  # fmt: skip

RUNS_AS = {
    "nvfp4": ("fp8", "bf16", "fp16", "fp32"), "fp8": ("bf16", "fp16", "fp32"), "int8": ("bf16", "fp16", "fp32"),
    "bf16": ("fp32",), "fp16": ("fp32",), "tf32": ("fp32",), "fp32": ("fp64",), "fp64": (),
}  # fmt: skip
"""What takes a dtype's values without loss, narrowest first: bf16 has the exponents of fp32, which fp16 lacks."""


def normal_dtype(name: str) -> str:
    """The one name of a dtype: bf16, fp16, fp32, tf32, fp64, fp8, int8, nvfp4. Raises KeyError for an unknown one."""
    return DTYPE_NAMES[name.lower()]


class ChipLink(Facts):
    """The chip's own interconnect ports."""

    kind: Literal["nvlink", "xgmi", "pcie", "ici", "other", "none"]
    count: int = 1
    gigabytes_per_second: float = Field(gt=0)
    """Per device, all ports together, each direction."""


class GemmTable(Facts):
    """Measured GEMM efficiency: fraction of the dense peak by the smallest of m, n, k (log-interpolated)."""

    layout: Literal["forward", "dgrad", "wgrad", "any"] = "any"
    dtype: str = "bf16"
    min_dim: tuple[float, ...]
    fraction_of_peak: tuple[float, ...]
    sustained: float | None = Field(default=None, gt=0, le=1.2)
    """Long-run rate over this table's, at the power limit it was measured under; None: as the other tables'."""
    source: str


class AttentionTable(Facts):
    """Measured attention efficiency: fraction of the dense peak by sequence length (log-interpolated)."""

    kernel: Literal["flash", "cudnn", "explicit"] = "flash"
    """flash: FlashAttention-2, torch's own; cudnn: cuDNN and FlashAttention-3 on Hopper (fused kernels)."""
    phase: Literal["forward", "backward"]
    causal: bool = True
    head_dim: int = 128
    seq: tuple[float, ...]
    fraction_of_peak: tuple[float, ...]
    source: str


class Curve(Facts):
    """A measured collective that replaces the default: seconds by full-buffer bytes, for `ranks` ranks on `nodes` nodes."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    ranks: int = Field(ge=2)
    nodes: int = Field(default=1, ge=1)
    bytes: tuple[float, ...]
    seconds: tuple[float, ...]
    source: str = ""


class LinkCurves(Facts):
    """Collectives measured between chips of this kind on one node's links of a given bandwidth."""

    gigabytes_per_second: float = Field(gt=0)
    """Per device, each direction: the curves hold for links of this bandwidth."""
    curves: tuple[Curve, ...]
    source: str


class Efficiency(Facts):
    """Fractions of peak that kernels reach. Empty tables fall back to the generic ones of `cost_models.compute`."""

    gemm: tuple[GemmTable, ...] = ()
    attention: tuple[AttentionTable, ...] = ()
    grouped_gemm: tuple[GemmTable, ...] = ()
    pointwise: dict[str, float] = {}
    """Operator class -> fraction of memory bandwidth.

    Classes: copy, add, norm, softmax, activation, dropout, embedding, loss, optimizer.
    """
    links: tuple[LinkCurves, ...] = ()
    sustained: float = Field(default=1.0, gt=0, le=1.2)
    """Long-run rate over microbenchmark rate (power limit)."""
    source: str = ""


class OverlapSlowdown(Facts):
    """How many times slower compute runs beside a concurrent collective."""

    gemm: float = Field(default=1.1, ge=1)
    attention: float = Field(default=1.1, ge=1)
    pointwise: float = Field(default=1.2, ge=1)
    source: str = ""


class Power(Facts):
    """Device power in watts."""

    idle: float = Field(ge=0)
    max: float = Field(gt=0)


class CommunicatorMemory(Facts):
    """GiB a process group's buffers take on a device: the first one, each further one, the first all-to-all."""

    first: float = Field(default=1.0, ge=0)
    each: float = Field(default=0.5, ge=0)
    all_to_all: float = Field(default=0.0, ge=0)


class Chip(Facts):
    """One device."""

    name: str
    vendor: str
    source: str
    """Where the figures come from; `sources` may add one per field."""
    sources: dict[str, str] = {}
    memory_gib: float = Field(gt=0)
    memory_gigabytes_per_second: float = Field(gt=0)
    teraflops: dict[str, float]
    """Dense peak by dtype."""
    launch_us: float = Field(default=3.0, ge=0)
    """Device-side cost of one more kernel."""
    host_us: float = Field(default=6.0, ge=0)
    """Host time to issue one operator in eager mode; the device waits where it is faster."""
    link: ChipLink
    power_watts: Power | None = None
    context_gib: float = Field(default=0.5, ge=0)
    communicator_gib: CommunicatorMemory = CommunicatorMemory()
    sustained: float | None = Field(default=None, gt=0, le=1.5)
    """Long-run over microbenchmark rate at this part's power limit; default: that of its tables."""
    efficiency: Annotated[Efficiency, OrText("name of built-in tables, such as ampere")] = Efficiency()
    overlap_slowdown: OverlapSlowdown = OverlapSlowdown()
    residuals: dict[str, float] = {}
    """Relative standard deviation of prediction errors by cost term (compute, collective, ...), for intervals."""

    @model_validator(mode="after")
    def _known_dtypes(self) -> Chip:
        unknown = [name for name in self.teraflops if DTYPE_NAMES.get(name) != name]
        if unknown:
            raise ValueError(f"teraflops has unknown dtypes {unknown}; allowed: {sorted(set(DTYPE_NAMES.values()))}")
        if not self.teraflops or any(value <= 0 for value in self.teraflops.values()):
            raise ValueError("teraflops must hold at least one dtype, all above 0")
        return self

    @property
    def sustained_rate(self) -> float:
        """Long-run over microbenchmark rate."""
        return self.efficiency.sustained if self.sustained is None else self.sustained

    @property
    def memory_bytes(self) -> float:
        """Device memory, bytes."""
        return self.memory_gib * GIB

    @property
    def memory_bytes_per_second(self) -> float:
        """Peak memory bandwidth, bytes per second."""
        return self.memory_gigabytes_per_second * 1e9

    @property
    def launch_seconds(self) -> float:
        """Device-side cost of one more kernel, seconds."""
        return self.launch_us * 1e-6

    @property
    def host_seconds(self) -> float:
        """Host cost of one eager operator, seconds."""
        return self.host_us * 1e-6

    def peak_flops(self, dtype: str) -> float:
        """Dense peak FLOP/s of a dtype; one that the chip lacks runs as the first of `RUNS_AS` that it has.

        Raises KeyError for an unknown dtype name.
        """
        name = normal_dtype(dtype)
        for wider in (name, *RUNS_AS[name]):
            if wider in self.teraflops:
                return self.teraflops[wider] * 1e12
        return min(self.teraflops.values()) * 1e12
