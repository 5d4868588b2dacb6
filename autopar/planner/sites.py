"""Where on the way from a producer to its readers the runtime can change a tensor's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.documents.graph import BlockClass, Graph, Operator, Site


@dataclass(frozen=True)
class Link:
    """A tensor at a site, and the readers that then see the changed state; `leaves`: so does the next block."""

    site: Site
    tensor: int
    readers: frozenset[int]
    leaves: bool = False

    @property
    def is_entry(self) -> bool:
        """Whether it is where the next block takes the tensor in."""
        return self.leaves and self.site.where == "input"


Place = tuple[str, str, int]
"""A site of a module, whichever call: the runtime's hooks act at every one."""


def place_of(site: Site) -> Place:
    """Where the runtime acts."""
    return site.module, site.where, site.argument


def repeated(block_class: BlockClass) -> set[Place]:
    """Places of modules that run more than once within a block: each time another tensor stands there."""
    tensors: dict[Place, set[int]] = {}
    for site in block_class.sites:
        tensors.setdefault(place_of(site), set()).add(site.tensor)
    return {place for place, several in tensors.items() if len(several) > 1}


def links(block_class: BlockClass, forward: list[Operator], entries: Sequence[Site] = ()) -> list[Link]:
    """Every useful link, the widest first; of sites with equal readers the outermost stands for all.

    An input site serves the readers inside its module of a tensor made outside it; an output site serves the readers
    outside its module of a tensor made inside it; an attention site serves the attention call; `entries` serve only what
    the class hands on.
    """
    writer = {tensor: operator for operator in forward for tensor in operator.writes}
    found: dict[tuple[int, frozenset[int], bool, Place | None], Link] = {}
    again = repeated(block_class)
    ordered = sorted(
        block_class.sites, key=lambda site: (site.where == "attention", site.module.count("."), site.module)
    )
    for site in ordered:
        made_in = writer[site.tensor].module if site.tensor in writer else None
        readers = frozenset(op.id for op in forward if site.tensor in op.reads and _serves(site, op, made_in))
        leaves = site.where == "output" and made_in is not None and site.tensor in block_class.outputs
        if readers or leaves:
            # What happens at one call of a module happens at all: none of its sites may stand for another.
            own = place_of(site) if place_of(site) in again else None
            found.setdefault((site.tensor, readers, leaves, own), Link(site, site.tensor, readers, leaves))
    ways = [Link(site, site.tensor, frozenset(), leaves=True) for site in entries]
    return [*ways, *sorted(found.values(), key=lambda link: -len(link.readers))]


def entries(graph: Graph, class_name: str) -> list[Site]:
    """Where the first block of a chain takes in what its prologue hands on.

    Code between an embedding and the first block may read the length of its sequences off the hidden states (for
    positions, rotary tables, masks): converted only here, they are whole until then.
    """
    found = []
    prologue = graph.class_by_name[class_name]
    for chain in graph.chains:
        block = graph.class_by_name[chain.block_class_of(0)]
        for taken in block.inputs[:1] if chain.prologue == class_name else ():
            dims = block.tensor_by_id[taken].dims
            # The prologue of a decoder hands on the encoder's output too.
            handed = next((tensor for tensor in prologue.outputs if prologue.tensor_by_id[tensor].dims == dims), None)
            found += [
                Site(module=chain.modules[0], where="input", argument=site.argument, tensor=handed)
                for site in block.sites
                if handed is not None and site.where == "input" and site.module == "" and site.tensor == taken
            ]
    return found


def _serves(site: Site, reader: Operator, made_in: str | None) -> bool:
    if site.where == "attention":
        return reader.module == site.module and reader.name.startswith("autopar.attention")
    inside = within(reader.module, site.module)
    made_inside = made_in is not None and within(made_in, site.module)
    if site.where == "input":
        return inside and not made_inside
    return made_inside and not inside


def within(module: str, outer: str) -> bool:
    """Whether a module is another or inside it."""
    return not outer or module == outer or module.startswith(outer + ".")
