"""A chip or a cluster as a page: every figure, and the number of its source in the list below.

memory_gib                   79.15   [2]
memory_gigabytes_per_second  2039    [1]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hardware_profiles.chip import AttentionTable, Chip, GemmTable, LinkCurves
from hardware_profiles.cluster import Cluster

Row = tuple[str, str, str]
"""Field, figure, source."""
WORDS = ("name", "source", "sources")
WIDEST = 40
DEFAULT = "assumption: the default where a file says nothing"
DISTILLED = "public measurements, distilled by benchmarks/distill_tables.py"
MEASURED = ("efficiency", "overlap_slowdown", "residuals")


def chip_page(chip: Chip) -> list[str]:
    """Every figure of a chip, its measured tables in short."""
    shown, given = chip.model_dump(exclude={*WORDS, *MEASURED}, exclude_none=True), chip.model_fields_set
    rows = [
        (field, figure, _source(field, chip.source, chip.sources) if field.split(".")[0] in given else DEFAULT)
        for field, figure in _figures(shown)
    ]
    return [f"chip {chip.name}", *_numbered([*rows, *_measured(chip)])]


def cluster_page(cluster: Cluster) -> list[str]:
    """Every figure that a cluster states but those of its chips."""
    shown = cluster.model_dump(exclude={*WORDS, "format", "curves"}, exclude_none=True, exclude_unset=True)
    for group, data in zip(cluster.node_groups, shown["node_groups"], strict=True):
        data["chip"] = group.chip.name
    rows = [(field, figure, _source(field, cluster.source, cluster.sources)) for field, figure in _figures(shown)]
    rows += [
        (f"curves.{curve.kind}", f"{curve.ranks} ranks", curve.source or cluster.source) for curve in cluster.curves
    ]
    return [f"cluster {cluster.name} ({cluster.devices:,} devices)", *_numbered(rows)]


def _figures(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Nested figures, each with its path; a list of numbers is one figure."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _figures(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        for number, item in enumerate(value):
            yield from _figures(item, f"{path}.{number}")
    elif not isinstance(value, list | tuple) or value:
        yield path, _figure(value)


def _figure(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return " ".join(f"[{_figure(item)}]" if isinstance(item, list | tuple) else _figure(item) for item in value)
    return f"{value:.12g}" if isinstance(value, int | float) else str(value)


def _source(field: str, whole: str, parts: dict[str, str]) -> str:
    """The source of the innermost part that names one. Parts of a node group are named without its number."""
    inner = field.split(".", 2)[2] if field.startswith("node_groups.") else field
    fitting = [name for name in parts if inner == name or inner.startswith(name + ".")]
    return parts[max(fitting, key=len)] if fitting else whole


def _measured(chip: Chip) -> Iterator[Row]:
    tables = chip.efficiency
    yield from (_table_row("gemm", table) for table in tables.gemm)
    yield from (_table_row("grouped_gemm", table) for table in tables.grouped_gemm)
    yield from (_attention_row(table) for table in tables.attention)
    yield from (_curves_row(link) for link in tables.links)
    named = tables.source or (DISTILLED if tables.gemm else DEFAULT)
    if tables.pointwise:
        yield "efficiency.pointwise", _pairs(tables.pointwise), named
    yield "efficiency.sustained", _figure(tables.sustained), named
    slowdown = chip.overlap_slowdown
    yield (
        "overlap_slowdown",
        _pairs(slowdown.model_dump(exclude={"source"})),
        slowdown.source or DEFAULT,
    )
    if chip.residuals:
        yield "residuals", _pairs(chip.residuals), "errors of the tables above on measurements held out of them"


def _table_row(kind: str, table: GemmTable) -> Row:
    shape = _span(table.min_dim, table.fraction_of_peak)
    return f"efficiency.{kind}.{table.layout}.{table.dtype}", shape, table.source


def _attention_row(table: AttentionTable) -> Row:
    name = f"efficiency.attention.{table.kernel}.{table.phase}"
    return name, _span(table.seq, table.fraction_of_peak), table.source


def _curves_row(link: LinkCurves) -> Row:
    shape = f"{len(link.curves)} measured collectives at {link.gigabytes_per_second:g} GB/s"
    return "efficiency.links", shape, link.source


def _span(points: tuple[float, ...], fractions: tuple[float, ...]) -> str:
    return f"{fractions[0]:g} at {points[0]:g} to {fractions[-1]:g} at {points[-1]:g}"


def _pairs(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {_figure(value)}" for name, value in figures.items())


def _numbered(rows: list[Row]) -> list[str]:
    """Rows with the number of their source, then the sources in order of first use."""
    numbers: dict[str, int] = {}
    for _, _, source in rows:
        numbers.setdefault(source, len(numbers) + 1)
    fields = max((len(field) for field, _, _ in rows), default=0)
    figures = max((len(figure) for _, figure, _ in rows if len(figure) <= WIDEST), default=0)
    lines = [f"  {field:<{fields}}  {figure:<{figures}}  [{numbers[source]}]" for field, figure, source in rows]
    return [*lines, *(f"  [{number}] {source}" for source, number in numbers.items())]
