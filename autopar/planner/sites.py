"""Where on the way from a producer to its readers the runtime can change a tensor's state."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.documents.graph import BlockClass, Operator, Site


@dataclass(frozen=True)
class Link:
    """A tensor at a site, and the readers that then see the changed state; `leaves`: so does the next block."""

    site: Site
    tensor: int
    readers: frozenset[int]
    leaves: bool = False


def links(block_class: BlockClass, forward: list[Operator]) -> list[Link]:
    """Every useful link, the widest first; of sites with equal readers the outermost stands for all.

    An input site serves the readers inside its module of a tensor made outside it; an output site serves the readers
    outside its module of a tensor made inside it; an attention site serves the attention call.
    """
    writer = {tensor: operator for operator in forward for tensor in operator.writes}
    found: dict[tuple[int, frozenset[int], bool], Link] = {}
    ordered = sorted(
        block_class.sites, key=lambda site: (site.where == "attention", site.module.count("."), site.module)
    )
    for site in ordered:
        made_in = writer[site.tensor].module if site.tensor in writer else None
        readers = frozenset(op.id for op in forward if site.tensor in op.reads and _serves(site, op, made_in))
        leaves = site.where == "output" and made_in is not None and site.tensor in block_class.outputs
        if readers or leaves:
            found.setdefault((site.tensor, readers, leaves), Link(site, site.tensor, readers, leaves))
    return sorted(found.values(), key=lambda link: -len(link.readers))


def _serves(site: Site, reader: Operator, made_in: str | None) -> bool:
    if site.where == "attention":
        return reader.module == site.module and reader.name.startswith("autopar.attention")
    inside = _within(reader.module, site.module)
    made_inside = made_in is not None and _within(made_in, site.module)
    if site.where == "input":
        return inside and not made_inside
    return made_inside and not inside


def _within(module: str, outer: str) -> bool:
    return not outer or module == outer or module.startswith(outer + ".")
